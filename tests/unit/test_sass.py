"""Reading SASS: the widths of accesses, and the main path told from the edge."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from wideload import sass
from wideload.errors import CompileError
from wideload.nvrtc import compile_cubin
from wideload.sass import Access, Instruction, accesses_by_line, disassemble, edge_lines, main_path, memory_accesses, parse_sass

# Two 16-byte loads and one store in full blocks; element by element in the last one.
ADD = """\
struct alignas(16) vec4 { float at[4]; };

__device__ __forceinline__ vec4 load4(const float* p) { return *reinterpret_cast<const vec4*>(p); }

extern "C" __global__ void __launch_bounds__(256)
    add(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, int n)
{
    const int first = blockIdx.x * 1024;
    const bool is_full = first + 1024 <= n;
    if (is_full) {  // inner block
        const int i = first + threadIdx.x * 4;
        const vec4 a = load4(x + i);
        const vec4 b = load4(y + i);
        vec4 sum;
#pragma unroll
        for (int k = 0; k < 4; ++k) { sum.at[k] = a.at[k] + b.at[k]; }
        *reinterpret_cast<vec4*>(out + i) = sum;
    } else {
        for (int i = first + threadIdx.x; i < n; i += 256) out[i] = x[i] + y[i];
    }
}
"""
NARROW_LOADS = ADD.replace("return *reinterpret_cast<const vec4*>(p);", "return {p[0], p[1], p[2], p[3]};")
NARROW_STORE = ADD.replace("*reinterpret_cast<vec4*>(out + i) = sum;", "for (int k = 0; k < 4; ++k) out[i + k] = sum.at[k];")
# The vectors are on a path that full blocks do not take.
WIDE_EDGE = ADD.replace("if (is_full) {", "if (is_full) {\n        out[first + threadIdx.x] = x[first + threadIdx.x];\n    } else {")
WIDE_EDGE = WIDE_EDGE[: WIDE_EDGE.rindex("    } else {")] + "    }\n}\n"


def compile_add(source: str, arch: str = "sm_90", name: str = "add") -> bytes:
    return compile_cubin(source, arch=arch, name=name).code


def widths(accesses: tuple[Access, ...]) -> Counter[tuple[str, int]]:
    return Counter((access.kind, access.width_bits) for access in accesses)


@pytest.fixture
def fresh_search() -> Iterator[None]:
    sass.find_nvdisasm.cache_clear()
    yield
    sass.find_nvdisasm.cache_clear()


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("LDG.E", ("load", "global", 32)),
        ("LDG.E.128", ("load", "global", 128)),
        ("LDG.E.128.CONSTANT", ("load", "global", 128)),
        ("LDG.E.U8", ("load", "global", 8)),
        ("LDG.E.S16.CONSTANT", ("load", "global", 16)),
        ("LDG.E.LTC128B", ("load", "global", 32)),  # a prefetch size, not a width
        ("LDG.E.LTC128B.64", ("load", "global", 64)),
        ("LDG.E.ENL2.256", ("load", "global", 256)),
        ("LDGSTS.E.BYPASS.128", ("load", "global", 128)),
        ("STG.E.64", ("store", "global", 64)),
        ("STG.E.EF.U16", ("store", "global", 16)),
        ("LDS.U.128", ("load", "shared", 128)),
        ("STS", ("store", "shared", 32)),
        ("LDL.64", ("load", "local", 64)),
        ("STL.128", ("store", "local", 128)),
        ("LD.E.128", ("load", "generic", 128)),
        ("LDCU.64", ("load", "constant", 64)),
    ],
)
def test_an_opcode_tells_kind_space_and_width(opcode: str, expected: tuple[str, str, int]) -> None:
    (access,) = memory_accesses([Instruction(opcode, "", 0)])
    assert (access.kind, access.space, access.width_bits, access.opcode) == (*expected, opcode)


@pytest.mark.parametrize("opcode", ["LDGDEPBAR", "LDGMC.E.128", "IADD3.X", "LEA.HI", "MOV.64", "STRANGE", "ATOMG.E.ADD.64"])
def test_what_neither_loads_nor_stores_is_no_access(opcode: str) -> None:
    assert memory_accesses([Instruction(opcode, "R0, desc[UR4][R2.64]", 0)]) == ()


def test_text_is_parsed_into_instructions_with_predicates_and_lines() -> None:
    text = """\
\t.section\t.text.add,"ax",@progbits
add:
.text.add:
\t//## File "/wideload/add.cu", line 7
        /*0070*/                   ISETP.LT.AND P0, PT, R0, UR5, PT ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
\t//## File "/wideload/add.cu", line 3 inlined at "/wideload/add.cu", line 9
\t//## File "/wideload/add.cu", line 9
        /*00e0*/              @!P0 LDG.E.128.CONSTANT R12, desc[UR6][R2.64] ;
.L_x_1:
        /*10f0*/             @!UP0 UIADD3 UR5, UR4, 0x400, URZ ;
\t//## File "/wideload/add.cu", line 12
        /*1100*/                   EXIT ;
$add$edge:
        /*1110*/                   RET.REL.NODEC R20 `(add) ;
"""
    assert parse_sass(text) == (
        Instruction("ISETP.LT.AND", "P0, PT, R0, UR5, PT", 0x70, None, (7,)),
        Instruction("BRA", "`(.L_x_1)", 0x80, "P0", (7,)),
        Instruction("LDG.E.128.CONSTANT", "R12, desc[UR6][R2.64]", 0xE0, "!P0", (3, 9)),
        Instruction("UIADD3", "UR5, UR4, 0x400, URZ", 0x10F0, "!UP0", (3, 9)),
        Instruction("EXIT", "", 0x1100, None, (12,)),
        Instruction("RET.REL.NODEC", "R20 `(add)", 0x1110, None, ()),
    )


def test_a_cubin_is_disassembled_to_the_last_instruction() -> None:
    text = disassemble(compile_add(ADD))
    instructions = parse_sass(text)
    assert "//## File" not in text
    assert text.count("/*") == len(instructions)
    assert [i.address for i in instructions] == [16 * k for k in range(len(instructions))]
    assert any(i.opcode == "EXIT" for i in instructions)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_main_path_of_a_vector_kernel_is_wide(arch: str) -> None:
    assert widths(main_path(compile_add(ADD, arch), ADD)) == {("load", 128): 2, ("store", 128): 1}


def test_the_narrow_accesses_of_the_edge_are_not_of_the_main_path() -> None:
    assert ("store", 32) in widths(accesses_by_line(compile_add(ADD)))


def test_an_inlined_access_has_the_lines_of_its_whole_call_chain() -> None:
    lines = ADD.splitlines()
    load4, first_call = (next(n for n, line in enumerate(lines, 1) if text in line) for text in ("load4(const", "load4(x"))
    assert (load4, first_call) in {access.lines for access in main_path(compile_add(ADD), ADD)}


def test_a_narrow_load_or_store_in_the_main_path_shows() -> None:
    assert widths(main_path(compile_add(NARROW_LOADS), NARROW_LOADS)) == {("load", 32): 8, ("store", 128): 1}
    assert widths(main_path(compile_add(NARROW_STORE), NARROW_STORE)) == {("load", 128): 2, ("store", 32): 4}


def test_a_wide_access_elsewhere_is_no_alibi() -> None:
    cubin = compile_add(WIDE_EDGE)
    accesses = widths(accesses_by_line(cubin))
    assert (accesses["load", 128], accesses["store", 128]) == (2, 1)
    assert {width for _, width in widths(main_path(cubin, WIDE_EDGE))} == {32}


def test_a_path_may_stand_in_several_blocks() -> None:
    source = """\
extern "C" __global__ void copy(const float4* x, float4* out, int n)
{
    const int i = blockIdx.x * 256 + threadIdx.x;
    const bool is_full = blockIdx.x * 256 + 256 <= n;
    float4 v;
    if (is_full) {
        v = x[i];
    } else {
        v.x = reinterpret_cast<const float*>(x)[i];
    }
    v.x *= 2.0f;
    if (is_full) { out[i] = v; }
    else { reinterpret_cast<float*>(out)[i] = v.x; }
}
"""
    assert widths(main_path(compile_add(source, name="copy"), source)) == {("load", 128): 1, ("store", 128): 1}


def test_thirty_two_byte_accesses_of_blackwell_are_seen() -> None:
    source = """\
extern "C" __global__ void copy(const float* x, float* out)
{
    if (true) {  // inner block
        float a, b, c, d, e, f, g, h;
        asm volatile("ld.global.v8.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
            : "=f"(a), "=f"(b), "=f"(c), "=f"(d), "=f"(e), "=f"(f), "=f"(g), "=f"(h) : "l"(x + threadIdx.x * 8));
        asm volatile("st.global.v8.f32 [%8], {%0,%1,%2,%3,%4,%5,%6,%7};"
            :: "f"(a), "f"(b), "f"(c), "f"(d), "f"(e), "f"(f), "f"(g), "f"(h), "l"(out + threadIdx.x * 8));
    }
}
"""
    cubin = compile_add(source, "sm_100", "copy")
    assert widths(main_path(cubin, source)) == {("load", 256): 1, ("store", 256): 1}


def test_spills_are_local_accesses() -> None:
    source = """\
extern "C" __global__ void __launch_bounds__(1024, 2) reverse(float* x)
{
    float v[64];
#pragma unroll
    for (int k = 0; k < 64; ++k) v[k] = x[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 64; ++k) x[k] = v[63 - k] * v[k];
}
"""
    cubin = compile_cubin(source, arch="sm_90", name="reverse")
    local = [access for access in accesses_by_line(cubin.code) if access.space == "local"]
    assert sum(access.width_bits // 8 for access in local if access.kind == "store") == cubin.spill_store_bytes
    assert sum(access.width_bits // 8 for access in local if access.kind == "load") == cubin.spill_load_bytes


def test_a_path_without_lines_is_never_called_wide() -> None:
    no_lineinfo = compile_cubin(ADD, arch="sm_90", name="add", lineinfo=False).code
    with pytest.raises(CompileError, match="compile with lineinfo=True"):
        main_path(no_lineinfo, ADD)


def test_a_block_that_never_closes_is_refused() -> None:
    with pytest.raises(CompileError, match="opens on line 2 of the source is never closed"):
        edge_lines("int x;\nif (is_full) {\n  // }\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a\nif (is_full) {\nb\n} else {\nc\nd\n}\ne", {4, 5, 6, 7}),
        ("if (is_full\n    && more) {  // } else {\nb\n}\nelse  // {\n{\nif (x) { c } else { d }\n}\ne", {6, 7, 8}),
        ("if (is_full) { b }\nelse { c }\nd", {2}),
        ("if (is_full) {\nif (x) {\nb\n} else {\nc\n}\n} else {\nd\n}\ne", {7, 8, 9}),
        ("if (is_full) {\nb\n}\nc\nif (is_full || x) {\nb\n} else {\nd\n}", {7, 8, 9}),
        ("if (other) {\nb\n} else {\nc\n}", set()),
        ("template <class T> DEVICE void store_some(T* p)\n{\nfor (;;) {\nb\n}\n}\nc", {2, 3, 4, 5, 6}),
        ("DEVICE void store_whole(int* p)\n{\nstore_some(p);\n}\nDEVICE int load_some() {\nb\n}", {5, 6, 7}),
    ],
)
def test_the_edge_is_what_stands_behind_whole_accesses(source: str, expected: set[int]) -> None:
    assert edge_lines(source) == expected


def test_a_damaged_cubin_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="could not read a cubin of 4 bytes"):
        disassemble(b"\x7fELF")


@pytest.mark.usefixtures("fresh_search")
def test_a_missing_nvdisasm_names_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="install the wheel nvidia-cuda-nvdisasm"):
        disassemble(b"\x7fELF")


@pytest.mark.usefixtures("fresh_search")
def test_nvdisasm_on_the_path_serves_where_there_is_no_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cubin = compile_add(ADD)
    expected = disassemble(cubin)
    os.symlink(sass.find_nvdisasm(), tmp_path / "nvdisasm")
    sass.find_nvdisasm.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert disassemble(cubin) == expected
    assert sass.find_nvdisasm() == Path(shutil.which("nvdisasm") or "")
