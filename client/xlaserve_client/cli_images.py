"""The commands that send images: `run`, `infer`, and one for each task."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from xlaserve_client import cli_inputs, cli_tensors
from xlaserve_client.cli_answers import ask_each, class_text, facts, heading, make_folder, output_files, say
from xlaserve_client.results import (
    ClassifyResult,
    DetectResult,
    EmbedResult,
    InferResult,
    LocateResult,
    SegmentResult,
    TranscribeResult,
)
from xlaserve_client.sync import VisionClient

Command = Callable[[VisionClient, argparse.Namespace], int]
"""Sends images, prints the answers, and returns the exit status."""

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


def _classify(client: VisionClient, options: argparse.Namespace) -> int:
    def lines(path: Path, result: ClassifyResult) -> list[str]:
        return [
            f"  {category.score:9.4f}  {class_text(category.label, category.index)}"
            for category in result.classifications[0].categories
        ]

    return ask_each(options, partial(client.classify, top_k=options.top_k), lines, dataclasses.asdict)


def _detect(client: VisionClient, options: argparse.Namespace) -> int:
    drawn = output_files(options, "detect", ".png")

    def lines(path: Path, result: DetectResult) -> list[str]:
        (found,) = result.results
        if options.out:
            from xlaserve_client.drawing import draw_boxes  # noqa: PLC0415 - needs Pillow

            draw_boxes(path, found).save(drawn[path])
        return [
            f"  {item.score:9.4f}  {class_text(item.label, item.index)}  "
            f"x {item.box.x_min:.1f} to {item.box.x_max:.1f}, y {item.box.y_min:.1f} to {item.box.y_max:.1f}"
            for item in found.detections
        ] or ["  nothing"]

    ask = partial(client.detect, min_score=options.min_score, max_detections=options.max_detections)
    return ask_each(options, ask, lines, dataclasses.asdict)


def _segment(client: VisionClient, options: argparse.Namespace) -> int:
    drawn = output_files(options, "segment", ".png")

    def lines(path: Path, result: SegmentResult) -> list[str]:
        (class_map,) = result.maps
        if options.out:
            from xlaserve_client.drawing import draw_classes  # noqa: PLC0415 - needs Pillow

            draw_classes(path, class_map).save(drawn[path])
        size = class_map.classes.size
        counts = ((class_map.label(index), index, pixels) for index, pixels in class_map.counts().items())
        return [f"  {pixels / size:8.2%}  {class_text(label, index)}" for label, index, pixels in counts]

    def as_json(result: SegmentResult) -> dict[str, Any]:
        (class_map,) = result.maps
        height, width = class_map.classes.shape
        counts = [
            {"index": index, "label": class_map.label(index), "pixels": pixels}
            for index, pixels in class_map.counts().items()
        ]
        return {"height": height, "width": width, "counts": counts, **facts(result)}

    return ask_each(options, client.segment, lines, as_json)


def _embed(client: VisionClient, options: argparse.Namespace) -> int:
    def lines(path: Path, result: EmbedResult) -> list[str]:
        (vector,) = result.vectors
        shown = " ".join(f"{value:.4f}" for value in vector[:_SHOWN])
        return [f"  {len(vector)} values: {shown}{' ...' if len(vector) > _SHOWN else ''}"]

    def as_json(result: EmbedResult) -> dict[str, Any]:
        return {"vector": result.vectors[0].tolist(), **facts(result)}

    return ask_each(options, client.embed, lines, as_json)


def _transcribe(client: VisionClient, options: argparse.Namespace) -> int:
    def lines(path: Path, result: TranscribeResult) -> list[str]:
        (found,) = result.transcriptions
        return [f"  {found.score:9.4f}  {found.text}"]

    return ask_each(options, client.transcribe, lines, dataclasses.asdict)


def _locate(client: VisionClient, options: argparse.Namespace) -> int:
    drawn = output_files(options, "locate", ".png")

    def lines(path: Path, result: LocateResult) -> list[str]:
        (found,) = result.results
        if options.out:
            from xlaserve_client.drawing import draw_keypoints  # noqa: PLC0415 - needs Pillow

            draw_keypoints(path, found).save(drawn[path])
        return [
            f"  {'' if item.score is None else f'{item.score:.4f}':>9}  {class_text(item.label, item.index)}  "
            f"x {item.x:.1f}, y {item.y:.1f}"
            for item in found.keypoints
        ] or ["  nothing"]

    return ask_each(options, partial(client.locate, min_score=options.min_score), lines, dataclasses.asdict)


def _infer_any(client: VisionClient, options: argparse.Namespace) -> int:
    """Runs a model on each image, or once on its inputs by their names."""
    cli_inputs.check(options)
    if options.images:
        return _on_images(_infer, client, options)
    result = client.infer(inputs=cli_inputs.read(options), model=options.model, mode=options.mode)
    if options.out:
        make_folder(options.out)
        cli_tensors.write_arrays(options.out / f"{options.model}-infer.npz", dict(result.outputs))
    if options.json:
        outputs = {name: values.tolist() for name, values in result.outputs.items()}
        say([json.dumps({"outputs": outputs, **facts(result)}, indent=2)])
    else:
        say([heading(options.model, result), *cli_tensors.lines(result.outputs)])
    return 0


def _infer(client: VisionClient, options: argparse.Namespace) -> int:
    written = output_files(options, "infer", ".npz")

    def lines(path: Path, result: InferResult) -> list[str]:
        outputs = {name: values[0] for name, values in result.outputs.items()}
        if options.out:
            cli_tensors.write(written[path], outputs)
        return cli_tensors.lines(outputs)

    def as_json(result: InferResult) -> dict[str, Any]:
        return {"outputs": {name: values[0].tolist() for name, values in result.outputs.items()}, **facts(result)}

    return ask_each(options, client.infer, lines, as_json)


_BY_TASK: Final[Mapping[str, Command]] = {
    "classification": _classify,
    "detection": _detect,
    "segmentation": _segment,
    "embedding": _embed,
    "sequence": _transcribe,
    "keypoints": _locate,
}
