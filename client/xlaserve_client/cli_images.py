"""The commands that send images: `run`, `infer`, and one for each task."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, TypeVar

from xlaserve_client import cli_inputs, cli_tensors
from xlaserve_client.errors import InvalidRequest
from xlaserve_client.results import (
    Answer,
    ClassifyResult,
    DetectResult,
    EmbedResult,
    InferResult,
    LocateResult,
    SegmentResult,
    TranscribeResult,
)
from xlaserve_client.sync import VisionClient

AnswerT = TypeVar("AnswerT", bound=Answer)

Command = Callable[[VisionClient, argparse.Namespace], int]
"""Sends images, prints the answers, and returns the exit status."""

_IN_FLIGHT: Final = 16
"""Requests under way at the same time, of one image each, so that the server can batch them."""
_IMAGE_SUFFIXES: Final = frozenset((".jpg", ".jpeg", ".png", ".webp"))
"""Suffixes of the files of a folder that are sent."""
_STDIN: Final = Path("-")
_SHOWN: Final = 4
"""Values of a vector that are printed."""


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the commands to argparse's `commands`."""
    images = argparse.ArgumentParser(add_help=False, parents=[common])
    images.add_argument("model", metavar="MODEL")
    add_images(images)
    _add_mode(images)
    drawn = argparse.ArgumentParser(add_help=False)
    drawn.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="draw what was found, as DIR/IMAGE-COMMAND.png",
    )
    run = commands.add_parser("run", parents=[images], help="do with images what the model is for")
    add_run_options(run)
    run.set_defaults(run=run_model)
    classify = commands.add_parser("classify", parents=[images], help="name what is in images")
    _add_top_k(classify)
    classify.set_defaults(run=partial(_on_images, _classify))
    detect = commands.add_parser("detect", parents=[images, drawn], help="find the objects in images")
    _add_detections(detect)
    detect.set_defaults(run=partial(_on_images, _detect))
    segment = commands.add_parser("segment", parents=[images, drawn], help="name the pixels of images")
    segment.set_defaults(run=partial(_on_images, _segment))
    embed = commands.add_parser("embed", parents=[images], help="make vectors of images")
    embed.set_defaults(run=partial(_on_images, _embed))
    transcribe = commands.add_parser("transcribe", parents=[images], help="read the text in images")
    transcribe.set_defaults(run=partial(_on_images, _transcribe))
    locate = commands.add_parser("locate", parents=[images, drawn], help="find the keypoints in images")
    locate.add_argument("--min-score", type=float, default=0.0, metavar="SCORE", help="leave out less likely keypoints")
    locate.set_defaults(run=partial(_on_images, _locate))
    infer = commands.add_parser("infer", parents=[common], help="print the output tensors of any model")
    infer.add_argument("model", metavar="MODEL")
    add_images(infer, at_least="*")
    cli_inputs.add_inputs(infer)
    _add_mode(infer)
    infer.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write them to DIR/IMAGE-infer.npz, for numpy.load; an image to DIR/IMAGE-infer.png; those of --input to"
        " DIR/MODEL-infer.npz",
    )
    infer.set_defaults(run=_infer_any)


def add_images(parser: argparse.ArgumentParser, *, at_least: Literal["*", "+"] = "+") -> None:
    """Adds the images, as all commands take them: `+` for one or more, `*` for any number."""
    parser.add_argument(
        "images",
        nargs=at_least,
        type=Path,
        metavar="IMAGE",
        help="a JPEG, PNG or WebP file, a folder of them, or - for stdin",
    )


def is_there(image: Path) -> bool:
    """Returns whether an image that a command line names can be looked for: stdin, or a path that exists."""
    return image == _STDIN or image.exists()


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run_model`."""
    _add_top_k(parser)
    _add_detections(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="draw what was found into copies of the images, or write the outputs"
    )


def run_model(client: VisionClient, options: argparse.Namespace) -> int:
    """Asks for what the model's task is, and prints that; the output tensors of a model of another task."""
    model = next((model for model in client.models() if model.name == options.model), None)
    if model is not None and not model.is_of_one_image:
        raise ValueError(f"{model.name} takes other inputs than one image: {cli_inputs.command(model)}")
    return _on_images(_BY_TASK.get(model.task if model else "", _infer), client, options)


def _on_images(ask: Command, client: VisionClient, options: argparse.Namespace) -> int:
    """Runs a command on the images of folders, and on an image of stdin as a file that is called so."""
    with TemporaryDirectory() as folder:
        images: list[Path] = []
        for path in options.images:
            if path == _STDIN:
                file = Path(folder, "stdin")
                file.write_bytes(sys.stdin.buffer.read())
                images.append(file)
            elif path.is_dir():
                images += _images_in(path)
            else:
                images.append(path)
        options.images = images
        return ask(client, options)


def _images_in(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGE_SUFFIXES)
    if not found:
        raise ValueError(f"{folder}: expected a folder with {', '.join(sorted(_IMAGE_SUFFIXES))} files, got none")
    return found


def _add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", help="one of the model's modes, which `models` lists; its default without it")


def _add_top_k(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--top-k", type=int, default=5, metavar="K", help="classes to print (%(default)s)")


def _add_detections(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-score", type=float, default=0.0, metavar="SCORE", help="leave out less likely objects")
    parser.add_argument("--max-detections", type=int, metavar="N", help="objects in an image; all without it")


def say(lines: Iterable[str]) -> None:
    """Prints lines."""
    for line in lines:
        sys.stdout.write(f"{line}\n")


def complain(options: argparse.Namespace, problem: object) -> None:
    """Prints a problem, in one line that begins with the command's `program`."""
    sys.stderr.write(f"{options.program}: {problem}\n")


def _classify(client: VisionClient, options: argparse.Namespace) -> int:
    def lines(path: Path, result: ClassifyResult) -> list[str]:
        return [
            f"  {category.score:9.4f}  {category.label}{_number(category.label, category.index)}"
            for category in result.classifications[0].categories
        ]

    return _ask_each(options, partial(client.classify, top_k=options.top_k), lines, dataclasses.asdict)


def _detect(client: VisionClient, options: argparse.Namespace) -> int:
    drawn = _files(options, "detect", ".png")

    def lines(path: Path, result: DetectResult) -> list[str]:
        (found,) = result.results
        if options.out:
            from xlaserve_client.drawing import draw_boxes  # noqa: PLC0415 - needs Pillow

            draw_boxes(path, found).save(drawn[path])
        return [
            f"  {item.score:9.4f}  {item.label}{_number(item.label, item.index)}  "
            f"x {item.box.x_min:.1f} to {item.box.x_max:.1f}, y {item.box.y_min:.1f} to {item.box.y_max:.1f}"
            for item in found.detections
        ] or ["  nothing"]

    ask = partial(client.detect, min_score=options.min_score, max_detections=options.max_detections)
    return _ask_each(options, ask, lines, dataclasses.asdict)


def _segment(client: VisionClient, options: argparse.Namespace) -> int:
    drawn = _files(options, "segment", ".png")

    def lines(path: Path, result: SegmentResult) -> list[str]:
        (class_map,) = result.maps
        if options.out:
            from xlaserve_client.drawing import draw_classes  # noqa: PLC0415 - needs Pillow

            draw_classes(path, class_map).save(drawn[path])
        size = class_map.classes.size
        counts = ((class_map.label(index), index, pixels) for index, pixels in class_map.counts().items())
        return [f"  {pixels / size:8.2%}  {label}{_number(label, index)}" for label, index, pixels in counts]

    def as_json(result: SegmentResult) -> dict[str, Any]:
        (class_map,) = result.maps
        height, width = class_map.classes.shape
        counts = [
            {"index": index, "label": class_map.label(index), "pixels": pixels}
            for index, pixels in class_map.counts().items()
        ]
        return {"height": height, "width": width, "counts": counts, **_common(result)}

    return _ask_each(options, client.segment, lines, as_json)


def _embed(client: VisionClient, options: argparse.Namespace) -> int:
    def lines(path: Path, result: EmbedResult) -> list[str]:
        (vector,) = result.vectors
        shown = " ".join(f"{value:.4f}" for value in vector[:_SHOWN])
        return [f"  {len(vector)} values: {shown}{' ...' if len(vector) > _SHOWN else ''}"]

    def as_json(result: EmbedResult) -> dict[str, Any]:
        return {"vector": result.vectors[0].tolist(), **_common(result)}

    return _ask_each(options, client.embed, lines, as_json)


def _transcribe(client: VisionClient, options: argparse.Namespace) -> int:
    def lines(path: Path, result: TranscribeResult) -> list[str]:
        (found,) = result.transcriptions
        return [f"  {found.score:9.4f}  {found.text}"]

    return _ask_each(options, client.transcribe, lines, dataclasses.asdict)


def _locate(client: VisionClient, options: argparse.Namespace) -> int:
    drawn = _files(options, "locate", ".png")

    def lines(path: Path, result: LocateResult) -> list[str]:
        (found,) = result.results
        if options.out:
            from xlaserve_client.drawing import draw_keypoints  # noqa: PLC0415 - needs Pillow

            draw_keypoints(path, found).save(drawn[path])
        return [
            f"  {'' if item.score is None else f'{item.score:.4f}':>9}  {item.label}{_number(item.label, item.index)}  "
            f"x {item.x:.1f}, y {item.y:.1f}"
            for item in found.keypoints
        ] or ["  nothing"]

    return _ask_each(options, partial(client.locate, min_score=options.min_score), lines, dataclasses.asdict)


def _infer_any(client: VisionClient, options: argparse.Namespace) -> int:
    """Runs a model on each image, or once on its inputs by their names."""
    cli_inputs.check(options)
    if options.images:
        return _on_images(_infer, client, options)
    result = client.infer(inputs=cli_inputs.read(options), model=options.model, mode=options.mode)
    if options.out:
        _make_folder(options.out)
        cli_tensors.write_arrays(options.out / f"{options.model}-infer.npz", dict(result.outputs))
    if options.json:
        outputs = {name: values.tolist() for name, values in result.outputs.items()}
        say([json.dumps({"outputs": outputs, **_common(result)}, indent=2)])
    else:
        say([_heading(options.model, result), *cli_tensors.lines(result.outputs)])
    return 0


def _infer(client: VisionClient, options: argparse.Namespace) -> int:
    written = _files(options, "infer", ".npz")

    def lines(path: Path, result: InferResult) -> list[str]:
        outputs = {name: values[0] for name, values in result.outputs.items()}
        if options.out:
            cli_tensors.write(written[path], outputs)
        return cli_tensors.lines(outputs)

    def as_json(result: InferResult) -> dict[str, Any]:
        return {"outputs": {name: values[0].tolist() for name, values in result.outputs.items()}, **_common(result)}

    return _ask_each(options, client.infer, lines, as_json)


_BY_TASK: Final[Mapping[str, Command]] = {
    "classification": _classify,
    "detection": _detect,
    "segmentation": _segment,
    "embedding": _embed,
    "sequence": _transcribe,
    "keypoints": _locate,
}


def _ask_each(
    options: argparse.Namespace,
    ask: Callable[..., AnswerT],
    lines: Callable[[Path, AnswerT], Iterable[str]],
    as_json: Callable[[AnswerT], dict[str, Any]],
) -> int:
    """Sends each image and prints the answers in order; returns 1 where a request failed, else 0."""
    if getattr(options, "out", None):
        _make_folder(options.out)
    answered: list[dict[str, Any]] = []
    failed = False
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        pending = [(path, pool.submit(ask, path, model=options.model, mode=options.mode)) for path in options.images]
        try:
            for path, future in pending:
                try:
                    result = future.result()
                    about = list(lines(path, result))
                except OSError as error:
                    failed = True
                    complain(options, f"{error.filename or path}: {error.strerror or error}")
                except InvalidRequest as error:
                    failed = True
                    complain(options, f"{path}: {error.message}")
                else:
                    if options.json:
                        answered.append({"image": str(path), **as_json(result)})
                    else:
                        say([_heading(path, result), *about])
        finally:
            pool.shutdown(cancel_futures=True)
    if options.json:
        say([json.dumps(answered, indent=2)])
    return int(failed)


def _heading(path: Path | str, result: Answer) -> str:
    spent = f", {result.timings.total_s * 1000:.1f} ms in the server" if result.timings else ""
    return f"{path}  ({result.mode or 'unknown mode'}{spent})"


def _number(label: str, index: int) -> str:
    return "" if label == str(index) else f"  ({index})"


def _common(result: Answer) -> dict[str, Any]:
    timings = dataclasses.asdict(result.timings) if result.timings else None
    return {"model": result.model, "version": result.version, "mode": result.mode, "timings": timings}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: expected a folder, got {folder}: {error.strerror}") from None


def _files(options: argparse.Namespace, command: str, suffix: str) -> dict[Path, Path]:
    """Returns the file that is written for each image: named after it and the command, with a number where a name
    recurs."""
    if options.out is None:
        return {}
    named: Counter[str] = Counter()
    files = {}
    for image in dict.fromkeys(options.images):
        named[image.stem] += 1
        number = f"-{named[image.stem]}" if named[image.stem] > 1 else ""
        files[image] = options.out / f"{image.stem}-{command}{number}{suffix}"
    return files
