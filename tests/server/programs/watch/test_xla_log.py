from __future__ import annotations

from xlaserve.programs.watch.xla_log import Reader, XlaCompilation

NAME = "__inference_forward_29"
# As TensorFlow 2.21 logs it: a resize whose size is an argument, called with two sizes.
ANALYSED = """\
I0000 00:00:1795276051.526255    7856 const_analysis.cc:265] marking consts for must-be-const inputs of resize/Bilinear
I0000 00:00:1795276051.526327    7856 const_analysis.cc:226] marking consts for must-be-const node s
I0000 00:00:1795276051.526332    7856 const_analysis.cc:234]   const _Arg 1: s
"""
COMPILED = f"""\
I0000 00:00:1795276051.526516    7857 xla_compiler.cc:820] XlaCompiler::CompileFunction {NAME}[_XlaMustCompile=true]
I0000 00:00:1795276051.526697    7857 xla_compiler.cc:894] XlaCompiler::CompileFunction: (failed to create: prefix)
I0000 00:00:1795276051.526893    7857 xla_compiler.cc:1265] XLA computation inputs:
I0000 00:00:1795276051.526904    7857 xla_compiler.cc:1268]   XLA arg 0 shape: f32[1,4,4,3] name:  TF arg 0 node name:
I0000 00:00:1795276051.527539    7857 xla_compiler.cc:1702] XLA output shape: (f32[1,8,8,3]{{3,2,1,0}}, f32[2]{{0}})
I0000 00:00:1795276051.596105    7857 device_compiler.h:538] Compilation of XLA executable time: 69.6 ms (69628 us) \
(cumulative: 155 ms, max: 69.6 ms, #called: 3)
"""
LOOKED_UP = """\
I0000 00:00:1795276051.546105    7857 device_executable_persistor.h:360] Try loading serialized cache entry:\
__inference_forward_29[_XlaMustCompile=true],float [1,4,4,3]; Tensor<type: int32 shape: [2] values: 9 7> time: 18 us
"""
FOUND = """\
I0000 00:00:1795276051.556105    7857 device_executable_persistor.h:371] Loading cached entry for: forward_29[],float
"""
BEGINNING, END = COMPILED.rsplit("I0000", 1)
END = f"I0000{END}"


def read(text: str) -> list[XlaCompilation]:
    reader = Reader()
    return [found for line in text.splitlines() if (found := reader.read(line)) is not None]


def test_a_compilation_has_its_function_shapes_constants_and_time() -> None:
    (compilation,) = read(ANALYSED + COMPILED)
    assert compilation == XlaCompilation(
        function=NAME,
        arguments=("f32[1,4,4,3]",),
        result="(f32[1,8,8,3], f32[2])",
        constants=("s (needed by resize/Bilinear)",),
        from_cache=False,
        seconds=0.069628,
        at_s=1795276051.596105,
        thread=7857,
    )
    assert str(compilation) == (
        f"{NAME} of (f32[1,4,4,3]) -> (f32[1,8,8,3], f32[2]), compile-time constants: s (needed by resize/Bilinear)"
    )


def test_constants_are_analysed_once_and_known_at_every_later_compilation() -> None:
    first, second = read(ANALYSED + COMPILED + COMPILED)
    assert first.constants == second.constants == ("s (needed by resize/Bilinear)",)


def test_an_argument_that_is_data_is_no_constant() -> None:
    (compilation,) = read(ANALYSED.replace("_Arg 1", "_Arg 0") + COMPILED)
    assert compilation.constants == ()


def test_threads_may_compile_at_the_same_time() -> None:
    other = COMPILED.replace(" 7857 ", " 7858 ").replace(NAME, "other").replace("[1,4,4,3]", "[2,4,4,3]")
    mixed = "\n".join(line for pair in zip(COMPILED.splitlines(), other.splitlines(), strict=True) for line in pair)
    assert {(each.function, each.arguments[0]) for each in read(mixed)} == {
        (NAME, "f32[1,4,4,3]"),
        ("other", "f32[2,4,4,3]"),
    }


def test_a_constant_has_its_value_where_xla_looked_into_a_cache() -> None:
    (compilation,) = read(ANALYSED + BEGINNING + LOOKED_UP + END)
    assert compilation.constants == ("s = 9 7 (needed by resize/Bilinear)",)
    assert not compilation.from_cache


def test_values_that_belong_to_no_known_name_are_said_as_well() -> None:
    (compilation,) = read(BEGINNING + LOOKED_UP + END)
    assert compilation.constants == ("9 7",)


def test_what_comes_from_a_cache_says_so() -> None:
    (compilation,) = read(ANALYSED + BEGINNING + LOOKED_UP + FOUND + END)
    assert compilation.from_cache


def test_an_end_without_its_beginning_is_still_a_compilation() -> None:
    (compilation,) = read(ANALYSED + END)
    assert (compilation.function, compilation.arguments, compilation.constants) == ("", (), ())
    assert str(compilation) == "a program of () -> unknown"


def test_of_many_arguments_the_first_are_shown() -> None:
    compilation = XlaCompilation("f", tuple(f"f32[{n}]" for n in range(262)), "f32[2]", (), False, 1.0, 2.0, 3)
    assert str(compilation) == "f of (f32[0], f32[1], f32[2], f32[3] and 258 more) -> f32[2]"


def test_other_lines_are_nothing() -> None:
    assert read("hello\n\nE0000 00:00:1.5    1 device_compiler.h:538] Compilation of XLA executable time: (5 us)") == []
