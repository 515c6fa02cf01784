"""Walks over PTX against sectors, wavefronts and lanes counted by hand."""

from __future__ import annotations

import pytest

from wideload.analyze.ptx import Walk, walk_ptx
from wideload.errors import CompileError
from wideload.nvrtc import compile_ptx

X, Y = 1 << 30, 1 << 31
SIZE = 1 << 28
I = "int i = blockIdx.x * blockDim.x + threadIdx.x;"  # noqa: E741


def walk(
    body: str, *numbers: int | float | None, grid: int = 100, block: int = 256, x: int = X, y: int = Y, declared: str = "int n"
) -> Walk:
    source = f'extern "C" __global__ void f(const float* x, float* y, {declared}) {{ {I} {body} }}'
    ptx = compile_ptx(source, arch="sm_90", name="f", fma=True)
    return walk_ptx(ptx, "f", (grid, 1, 1), (block, 1, 1), [x, y, *numbers], [(x, x + SIZE), (y, y + SIZE)])


def sectors(found: Walk, kind: str) -> float:
    return sum(access.sectors for access in found.accesses if access.kind == kind and access.space == "global")


def test_neighbours_fill_their_sectors() -> None:
    found = walk("if (i < n) y[i] = x[i];", 100 * 256)
    assert [(a.kind, a.width_bytes, a.region, a.requests, a.sectors, a.ideal_sectors) for a in found.accesses] == [
        ("load", 4, 0, 800, 3200, 3200),
        ("store", 4, 1, 800, 3200, 3200),
    ]
    assert (found.reads[0].nbytes, found.reads[0].sectors, found.writes[1].nbytes) == (102400, 3200, 102400)
    assert (found.is_exact, found.has_loops, found.lane_share) == (True, False, 1.0)


def test_the_last_blocks_may_be_partly_idle() -> None:
    found = walk("if (i < n) y[i] = x[i];", 25_500)  # 796 warps, and one of 28 lanes: four sectors, half of the last
    assert sum(a.requests for a in found.accesses if a.kind == "load") == 797
    assert sectors(found, "load") == 797 * 4
    assert found.reads[0].nbytes == 102_000


@pytest.mark.parametrize(("stride", "each"), [(2, 8), (3, 12), (8, 32), (100, 32), (0, 1)])
def test_strides(stride: int, each: int) -> None:
    assert sectors(walk("y[i] = x[i * n];", stride), "load") == 800 * each


def test_misaligned_addresses_touch_one_sector_more() -> None:
    found = walk("y[i] = x[i];", 0, y=Y + 4)
    assert (sectors(found, "load"), sectors(found, "store")) == (3200, 4000)
    assert found.writes[1].sectors == 100 * 33, "warps of a block share the sectors between them"


def test_vectors() -> None:
    found = walk("((float4*)y)[i] = ((const float4*)x)[i];", 0)
    assert {(a.width_bytes, a.sectors / a.requests) for a in found.accesses} == {(16, 16.0)}


def test_loops_are_turned() -> None:
    found = walk("for (int k = i; k < n; k += gridDim.x * blockDim.x) y[k] = x[k];", 100 * 256 * 50)
    assert (found.has_loops, sectors(found, "load"), found.reads[0].nbytes) == (True, 50 * 3200, 50 * 102400)
    assert found.accesses[0].is_repeated


def test_an_address_from_memory_is_unknown_and_its_operand_known() -> None:
    found = walk("y[i] = x[((const int*)x)[i] & 255];", 0)
    first, gathered = (a for a in found.accesses if a.kind == "load")
    assert (first.is_known, first.sectors) == (True, 3200)
    assert (gathered.is_known, gathered.region, gathered.sectors, found.is_exact) == (False, 0, 25_600, False)


def test_a_branch_on_a_value_falls_through_unless_it_skips_a_loop() -> None:
    assert sectors(walk("if (x[i] > 0) y[i] = 1;", 0), "store") == 3200
    # sinf's reduction of huge arguments is such a loop, with a table in memory that is no operand.
    found = walk("y[i] = sinf(x[i]);", 0)
    assert (sectors(found, "load"), sectors(found, "store"), found.has_loops) == (3200, 3200, False)


def test_lanes_that_idle() -> None:
    found = walk("float v = x[i]; if (i % 32 == 0)\n#pragma unroll 1\nfor (int k = 0; k < n; k++) v = v * v; y[i] = v;", 1000)
    assert found.lane_share < 0.1
    assert found.units["fp32"] > 1000, "the other lanes wait for the one"
    assert walk("float v = x[i];\n#pragma unroll 1\nfor (int k = 0; k < n; k++) v = v * v; y[i] = v;", 1000).lane_share == 1.0


@pytest.mark.parametrize(("pitch", "wavefronts"), [(32, 32), (33, 1), (16, 16), (2, 2), (1, 1), (0, 1)])
def test_bank_conflicts(pitch: int, wavefronts: int) -> None:
    found = walk(f"__shared__ float s[2048]; s[threadIdx.x] = x[i]; __syncthreads(); y[i] = s[threadIdx.x % 32 * {pitch}];", 0)
    load = next(a for a in found.accesses if a.space == "shared" and a.kind == "load")
    assert (load.wavefronts / load.requests, load.ideal_wavefronts / load.requests) == (wavefronts, 1)


def test_wide_shared_accesses_take_a_turn_for_each_128_bytes() -> None:
    found = walk(
        "__shared__ float4 s[256]; s[threadIdx.x] = ((const float4*)x)[i]; __syncthreads(); ((float4*)y)[i] = s[255 - threadIdx.x];", 0
    )
    shared = [a for a in found.accesses if a.space == "shared"]
    assert [(a.wavefronts / a.requests, a.ideal_wavefronts / a.requests) for a in shared] == [(4, 4), (4, 4)]


@pytest.mark.parametrize(
    ("index", "at"),
    [
        ("(i * 7 + 3) / 5 % 11", lambda i: (i * 7 + 3) // 5 % 11),
        ("(unsigned)i * 2654435761u >> 20", lambda i: (i * 2654435761 % 2**32) >> 20),
        ("-i + 30000", lambda i: 30000 - i),
        ("max(i, 100) - min(i, 50)", lambda i: max(i, 100) - min(i, 50)),
        ("__umulhi(i, 1u << 31)", lambda i: i * 2**31 >> 32),
        ("__mulhi(-i, 1 << 20) + 1", lambda i: (-i * 2**20 >> 32) + 1),
        ("(unsigned long long)i * 0x9e3779b97f4a7c15ull / 3 >> 50", lambda i: (i * 0x9E3779B97F4A7C15 % 2**64) // 3 >> 50),
        ("(i & 255) ^ (i >> 3 | 5)", lambda i: (i & 255) ^ (i >> 3 | 5)),
        ("(int)((long long)i * i % 4099)", lambda i: i * i % 4099),
        ("i & 1 ? i : 2 * i", lambda i: i if i & 1 else 2 * i),
        ("abs(i - 1000)", lambda i: abs(i - 1000)),
        ("__brev(i << 20) & 0xfff", None),  # not reckoned: unknown, and never wrong
    ],
)
def test_integers_are_those_of_the_gpu(index: str, at: object) -> None:
    found = walk(f"y[i] = x[{index}];", 0, grid=4)
    load = next(a for a in found.accesses if a.kind == "load")
    if at is None:
        assert not load.is_known
        return
    warps = [range(start, start + 32) for start in range(0, 1024, 32)]
    assert callable(at)
    assert load.sectors == sum(len({at(i) // 8 for i in warp}) for warp in warps)


def test_asynchronous_copies_are_loads() -> None:
    found = walk(
        """__shared__ float4 s[256];
        unsigned to = (unsigned)__cvta_generic_to_shared(s + threadIdx.x);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"((const float4*)x + i));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        y[i] = s[255 - threadIdx.x].x;""",
        0,
    )
    assert (sectors(found, "load"), sectors(found, "store"), found.is_exact) == (800 * 16, 3200, True)


def test_a_thread_that_may_return_goes_on() -> None:
    ptx = """.visible .entry f(.param .u64 f_0) {
        ld.param.u64 %rd1, [f_0];
        ld.global.u32 %r1, [%rd1];
        setp.eq.s32 %p1, %r1, 0;
        @%p1 ret;
        st.global.u32 [%rd1+4], 1;
        ret;
    }"""
    found = walk_ptx(ptx, "f", (1, 1, 1), (32, 1, 1), [X], [(X, X + 64)])
    assert [(a.kind, a.sectors) for a in found.accesses] == [("load", 1), ("store", 1)]
    assert not found.is_exact


def test_a_number_that_is_not_known() -> None:
    found = walk("if (a > 0) y[i] = x[i];", None, declared="float a")
    assert (sectors(found, "store"), found.is_exact) == (3200, False)


def test_a_walk_ends() -> None:
    found = walk("\n#pragma unroll 1\nfor (long long k = 0; k < (1ll << 40); k += n) y[k & 255] = x[i];", 1, grid=1, block=32)
    assert (found.is_exact, found.is_cut) == (False, True)
    assert not walk("y[i] = x[i];", 0).is_cut


def outside(found: Walk) -> list[tuple[str, int, bool, int]]:
    return [(o.kind, o.region, o.is_behind, o.nbytes) for o in found.outside]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"y[i] = x[i + {SIZE // 4}];", [("load", 0, True, 4 * 25_600)]),
        (f"y[i + {SIZE // 4}] = x[i];", [("store", 1, True, 4 * 25_600)]),
        ("y[i - 7] = x[i];", [("store", 1, False, 28)]),
        ("atomicAdd(y - 1 - i, 1.0f);", [("atomic", 1, False, 4 * 25_600)]),
        # Aligned words that hold the operand's ends are read to shift what is misaligned; written, they overwrite a neighbour.
        ("y[i] = ((const double*)(x - 1))[i];", []),
        ("((double*)(y - 1))[i] = x[i];", [("store", 1, False, 4)]),
        (f"if (x[i] > 0) y[i + {SIZE // 4}] = 1;", []),  # perhaps of no thread
        (f"y[(i & 1) * {SIZE // 4} - (1 - (i & 1))] = x[i];", [("store", 1, True, 4), ("store", 1, False, 4)]),
        ('__shared__ float s[256]; float* p = s + threadIdx.x; asm volatile("st.f32 [%0], 0f00000000;" ::"l"(p)); y[i] = x[i];', []),
    ],
)
def test_accesses_outside_of_every_operand(body: str, expected: list[tuple[str, int, bool, int]]) -> None:
    assert outside(walk(body, 0)) == expected


def test_accesses_outside_are_seen_in_late_turns_of_a_loop() -> None:
    found = walk("for (int k = i; k < n; k += 25600) y[k] = 0;", 2622 * 25600)
    assert outside(found) == [("store", 1, True, 4 * 2622 * 25600 - SIZE)]


def test_no_such_kernel() -> None:
    with pytest.raises(CompileError, match="no kernel 'g'"):
        walk_ptx(".visible .entry f() { ret; }", "g", (1, 1, 1), (32, 1, 1), [], [])
