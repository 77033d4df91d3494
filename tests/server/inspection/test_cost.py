from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.inspection import cost, hlo
from xlaserve.inspection.cost import Cost

BODIES = """
%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}
"""


def costs(entry: str, bodies: str = BODIES) -> dict[str, Cost]:
    module = hlo.parse(f"HloModule m\n{bodies}\nENTRY %main () -> f32[] {{\n{textwrap.indent(entry.strip(), '  ')}\n}}")
    return {instruction.name: price for instruction, price in cost.instructions(module)}


def test_a_matrix_product_is_two_operations_for_each_product() -> None:
    found = costs("""
        %a = f32[5,7]{1,0} parameter(0)
        %b = f32[7,3]{1,0} parameter(1)
        ROOT %dot = f32[5,3]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    """)
    assert found == {"dot": Cost(flops=2 * 5 * 3 * 7, bytes=4 * (35 + 21 + 15))}


def test_a_batched_matrix_product_contracts_what_it_says() -> None:
    found = costs("""
        %a = f32[2,5,7,4]{3,2,1,0} parameter(0)
        %b = f32[2,7,4,3]{3,2,1,0} parameter(1)
        ROOT %dot = f32[2,5,3]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, \
rhs_batch_dims={0}, rhs_contracting_dims={1,2}
    """)
    assert found["dot"].flops == 2 * (2 * 5 * 3) * (7 * 4)


def convolution(attributes: str, image: str, kernel: str, output: str) -> int:
    return costs(f"""
        %image = f32[{image}] parameter(0)
        %kernel = f32[{kernel}] parameter(1)
        ROOT %conv = f32[{output}] convolution(%image, %kernel), {attributes}
    """)["conv"].flops


def test_a_convolution_without_padding_is_its_kernel_at_every_place() -> None:
    flops = convolution("window={size=3x3}, dim_labels=b01f_01io->b01f", "2,8,8,5", "3,3,5,7", "2,6,6,7")
    assert flops == 2 * 2 * 6 * 6 * (3 * 3 * 5) * 7


def test_a_window_counts_nothing_where_it_lies_on_padding() -> None:
    flops = convolution("window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", "1,4,4,1", "3,3,1,1", "1,4,4,1")
    assert flops == 2 * (3 * 4 - 2) ** 2  # along a side of four, the windows at both ends miss one each


def test_strides_and_dilations_are_part_of_the_window() -> None:
    strided = "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_01io->b01f"
    assert convolution(strided, "1,4,4,1", "3,3,1,1", "1,2,2,1") == 2 * (3 * 2 - 1) ** 2
    dilated = "window={size=3x3 rhs_dilate=2x2}, dim_labels=b01f_01io->b01f"
    assert convolution(dilated, "1,5,5,1", "3,3,1,1", "1,1,1,1") == 2 * 9
    # A transposed convolution: the image is spread, and what lies between its pixels is no data.
    spread = "window={size=2x2 pad=1_1x1_1 lhs_dilate=2x2}, dim_labels=b01f_01io->b01f"
    assert convolution(spread, "1,2,2,1", "2,2,1,1", "1,4,4,1") == 2 * 4**2


def test_a_depthwise_convolution_reads_one_feature_for_each_output() -> None:
    attributes = "window={size=3x3}, dim_labels=b01f_01io->b01f, feature_group_count=8"
    assert convolution(attributes, "1,6,6,8", "3,3,1,8", "1,4,4,8") == 2 * 16 * 9 * 8


def test_labels_say_which_dimension_is_which() -> None:
    flops = convolution("window={size=3x2}, dim_labels=bf01_oi01->bf01", "2,5,8,9", "7,5,3,2", "2,7,6,8")
    assert flops == 2 * 2 * (6 * 8) * (3 * 2 * 5) * 7


@given(side=st.integers(1, 12), kernel=st.integers(1, 5), stride=st.integers(1, 3), pad=st.integers(0, 4))
def test_valid_places_are_those_that_a_loop_finds(side: int, kernel: int, stride: int, pad: int) -> None:
    output = (side + 2 * pad - kernel) // stride + 1
    if output < 1:
        return
    padded = [False] * pad + [True] * side + [False] * pad
    expected = sum(padded[place * stride + offset] for place in range(output) for offset in range(kernel))
    window = f"window={{size={kernel}x1 stride={stride}x1 pad={pad}_{pad}x0_0}}, dim_labels=b01f_01io->b01f"
    assert convolution(window, f"1,{side},1,1", f"{kernel},1,1,1", f"1,{output},1,1") == 2 * expected


def test_a_fusion_computes_its_body_and_reads_its_operands_once() -> None:
    body = """
        %fused (p0: f32[8], p1: f32[8]) -> f32[8] {
          %p0 = f32[8]{0} parameter(0)
          %p1 = f32[8]{0} parameter(1)
          %sum.1 = f32[8]{0} add(%p0, %p1)
          %twice = f32[8]{0} multiply(%sum.1, %p0)
          ROOT %root = f32[8]{0} rsqrt(%twice)
        }
    """
    found = costs(
        """
        %a = f32[8]{0} parameter(0)
        %b = f32[8]{0} parameter(1)
        ROOT %fusion = f32[8]{0} fusion(%a, %b), kind=kLoop, calls=%fused
        """,
        textwrap.dedent(body),
    )
    assert found == {"fusion": Cost(flops=3 * 8, bytes=3 * 8 * 4)}


def test_of_an_operand_that_a_fusion_slices_only_the_slices_are_read() -> None:
    body = """
        %fused (p0: f32[100]) -> f32[4] {
          %p0 = f32[100]{0} parameter(0)
          %low = f32[4]{0} slice(%p0), slice={[0:4]}
          %high = f32[4]{0} slice(%p0), slice={[96:100]}
          ROOT %sum.1 = f32[4]{0} add(%low, %high)
        }
    """
    found = costs(
        "%a = f32[100]{0} parameter(0)\n        ROOT %f = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused",
        textwrap.dedent(body),
    )
    assert found["f"] == Cost(flops=4, bytes=(4 + 4 + 4) * 4)


def test_reductions_apply_their_body_to_every_element_but_the_first() -> None:
    found = costs("""
        %a = f32[2,10]{1,0} parameter(0)
        %zero = f32[] constant(0)
        %sums = f32[2]{0} reduce(%a, %zero), dimensions={1}, to_apply=%sum
        ROOT %windows = f32[2,5]{1,0} reduce-window(%a, %zero), window={size=1x2 stride=1x2}, to_apply=%sum
    """)
    assert found["sums"].flops == 2 * 9
    assert found["windows"].flops == 2 * 5 * 1


def test_integers_casts_and_copies_count_no_flops_but_move_bytes() -> None:
    found = costs("""
        %a = s32[8]{0} parameter(0)
        %b = s32[8]{0} add(%a, %a)
        %c = f32[8]{0} convert(%b)
        ROOT %d = f32[8]{0} copy(%c)
    """)
    assert found == {name: Cost(0, bytes_moved) for name, bytes_moved in (("b", 96), ("c", 64), ("d", 64))}


def test_a_fusion_that_updates_in_place_moves_the_update_alone() -> None:
    body = """
        %fused (x: f32[100], u: f32[4], at: s32[]) -> f32[100] {
          %x = f32[100]{0} parameter(0)
          %u = f32[4]{0} parameter(1)
          %at = s32[] parameter(2)
          %twice = f32[4]{0} add(%u, %u)
          ROOT %placed = f32[100]{0} dynamic-update-slice(%x, %twice, %at)
        }
    """
    found = costs(
        """
        %a = f32[100]{0} parameter(0)
        %b = f32[4]{0} parameter(1)
        %c = s32[] parameter(2)
        ROOT %f = f32[100]{0} fusion(%a, %b, %c), kind=kLoop, calls=%fused
    """,
        textwrap.dedent(body),
    )
    assert found == {"f": Cost(flops=4, bytes=16 + 16 + 4)}


def test_loops_count_their_rounds_where_they_are_known() -> None:
    bodies = """
        %body (s: f32[4]) -> f32[4] {
          %s = f32[4]{0} parameter(0)
          ROOT %twice = f32[4]{0} add(%s, %s)
        }
        %condition (s: f32[4]) -> pred[] {
          %s = f32[4]{0} parameter(0)
          ROOT %yes = pred[] constant(true)
        }
    """
    loop = "ROOT %w = f32[4]{0} while(%a), condition=%condition, body=%body"
    known = ', backend_config={"known_trip_count":{"n":"5"}}'
    text = textwrap.dedent(bodies)
    assert costs(f"%a = f32[4]{{0}} parameter(0)\n        {loop}", text)["twice"].flops == 4
    assert costs(f"%a = f32[4]{{0}} parameter(0)\n        {loop}{known}", text)["twice"] == Cost(5 * 4, 5 * 3 * 16)


@pytest.mark.parametrize(
    ("attributes", "flops"),
    [
        ('custom_call_target="TopK"', 0),
        (
            'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
            '{"lhs_contracting_dimensions":["1"]}}}',
            2 * 15 * 7,
        ),
    ],
)
def test_what_a_library_does_is_counted_where_its_call_says_so(attributes: str, flops: int) -> None:
    found = costs(f"""
        %a = f32[5,7]{{1,0}} parameter(0)
        %b = f32[7,3]{{1,0}} parameter(1)
        ROOT %call = (f32[5,3]{{1,0}}, s8[64]{{0}}) custom-call(%a, %b), {attributes}
    """)
    assert found["call"].flops == flops


def test_intensity_is_operations_a_byte() -> None:
    assert Cost(10, 4).intensity == 2.5
    assert Cost(10, 0).intensity == 0.0
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
