from __future__ import annotations

import pytest

from xlaserve.inspection import hlo
from xlaserve.inspection.hlo import HloSyntaxError, Shape

PROGRAM = """\
HloModule a_small_one, is_scheduled=true, entry_computation_layout={(u8[2,4]{1,0}, f32[4]{0})->(f32[2,4]{1,0})}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}

%fused_computation (param_0: u8[2,4]) -> f32[2,4] {
  %param_0 = u8[2,4]{1,0} parameter(0)
  %convert = f32[2,4]{1,0} convert(%param_0)
  %constant.7 = f32[] constant(0.0078), metadata={op_type="RealDiv" op_name="truediv"}
  %broadcast = f32[2,4]{1,0} broadcast(%constant.7), dimensions={}
  ROOT %multiply = f32[2,4]{1,0} multiply(%convert, %broadcast)
}

ENTRY %main (arg0.1: u8[2,4], arg1.1: f32[4], /*index=2*/arg2.1: (f32[], s32[3])) -> (f32[2,4]) {
  %arg0.1 = u8[2,4]{1,0} parameter(0), metadata={op_name="XLA_Args"}
  %arg1.1 = f32[4]{0:T(8,128)} parameter(1)
  %arg2.1 = (f32[], s32[3]{0}) parameter(2)
  %strings = f32[2]{0} constant({1, /*index=1*/ 2})
  %pixels = f32[2,4]{1,0} fusion(%arg0.1), kind=kLoop, calls=%fused_computation, metadata={op_type="Mul" \
op_name="net_1/stem, first/norm/mul" source_file="/a b/c.py" source_line=3}
  %pick = s32[3]{0} get-tuple-element(%arg2.1), index=1
  %zero = f32[] constant(0)
  %reduce.1 = f32[2]{0} reduce(f32[2,4]{1,0} %pixels, f32[] %zero), dimensions={1}, to_apply=%sum
  ROOT %out = (f32[2,4]{1,0}) tuple(%pixels)
}
"""


def test_a_module_is_its_computations_with_their_instructions() -> None:
    module = hlo.parse(PROGRAM)
    assert list(module.computations) == ["sum", "fused_computation", "main"]
    assert list(module.entry.instructions)[-1] == "out"
    fusion = module.entry.instructions["pixels"]
    assert (fusion.opcode, fusion.kind, fusion.operands, fusion.called) == (
        *("fusion", "kLoop", ("arg0.1",)),
        ("fused_computation",),
    )
    assert fusion.shape == Shape("f32", (2, 4))


def test_operands_are_names_whether_or_not_their_types_are_printed() -> None:
    reduce = hlo.parse(PROGRAM).entry.instructions["reduce.1"]
    assert reduce.operands == ("pixels", "zero")
    assert reduce.called == ("sum",)


def test_parameters_come_by_number_and_constants_keep_their_text() -> None:
    entry = hlo.parse(PROGRAM).entry
    assert [parameter.name for parameter in entry.parameters] == ["arg0.1", "arg1.1", "arg2.1"]
    assert entry.instructions["strings"].literal == "{1,  2}"
    assert entry.instructions["strings"].operands == ()


def test_users_are_those_that_an_instruction_is_an_operand_of() -> None:
    users = hlo.parse(PROGRAM).entry.users()
    assert [user.name for user in users["pixels"]] == ["reduce.1", "out"]
    assert users["out"] == []


def test_operations_in_fusions_are_counted_and_renamings_are_not() -> None:
    assert hlo.parse(PROGRAM).count() == len(["add.1", "convert", "broadcast", "multiply", "pixels", "reduce.1"])


def test_the_layer_is_the_path_without_the_model_and_the_operation() -> None:
    entry = hlo.parse(PROGRAM).entry
    assert entry.instructions["pixels"].layer == "stem, first/norm"
    one = hlo.parse(PROGRAM.replace("net_1/stem, first/norm/mul", "net_1/conv_pw_1/convolution"))
    assert one.entry.instructions["pixels"].layer == "conv_pw_1"
    assert hlo.parse(PROGRAM).computations["fused_computation"].instructions["constant.7"].layer == "truediv"
    assert entry.instructions["reduce.1"].layer == ""


@pytest.mark.parametrize(
    ("text", "shape", "size_bytes"),
    [
        ("f32[2,3]{1,0}", Shape("f32", (2, 3)), 24),
        ("bf16[]", Shape("bf16"), 2),
        ("pred[<=8]", Shape("pred", (8,)), 8),
        ("f8e4m3fn[5]", Shape("f8e4m3fn", (5,)), 5),
        ("s4[3]", Shape("s4", (3,)), 2),
        ("f32[0,7]", Shape("f32", (0, 7)), 0),
        ("(f32[2]{0}, /*index=1*/(u8[3], token[]))", None, 11),
    ],
)
def test_shapes_have_a_type_sides_and_a_size(text: str, shape: Shape | None, size_bytes: int) -> None:
    parsed = hlo.parse_shape(text)
    assert parsed.size_bytes == size_bytes
    assert shape is None or parsed == shape


def test_a_shape_is_printed_as_it_is_written() -> None:
    assert str(hlo.parse_shape("(f32[2,3]{1,0}, u8[])")) == "(f32[2,3], u8[])"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("  %a = nonsense", "no shape"),
        ("  %a = f32[2] ", "no opcode"),
        ("  %a = f32[2] add(%b, %c", "an open bracket"),
        ("  what is this", "no instruction"),
    ],
)
def test_what_is_not_understood_is_said_with_its_line(line: str, reason: str) -> None:
    with pytest.raises(HloSyntaxError, match=f"line 2: {reason}"):
        hlo.parse(f"ENTRY %main () -> f32[] {{\n{line}\n}}")


@pytest.mark.parametrize("text", ["", "HloModule m", "hello", "ENTRY %main () -> f32[] {\n}"])
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(HloSyntaxError, match="expected a module with an ENTRY computation"):
        hlo.parse(text)
