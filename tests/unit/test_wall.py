"""The yardstick's kernels as NVRTC compiles them and as the emulator runs them, and the arithmetic of ceilings and mixes."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from tests.emulator.emulator import build, run_on
from wideload.errors import DeviceError, LayoutError
from wideload.measure import wall
from wideload.measure.wall import (
    FAULT_RATIO,
    MIXES,
    Ceiling,
    Mix,
    Mover,
    Wall,
    cuda_index,
    find_ceiling,
    measure_wall,
    mover_source,
    movers,
    nearest_mix,
    prepare_movers,
)
from wideload.nvrtc import Cubin, compile_cubin
from wideload.sass import Instruction, disassemble, memory_accesses, parse_sass

KEY = torch.tensor([0x243F6A88, 0x85A308D3 - 2**32, 0x13198A2E, 0x03707344], dtype=torch.int32)
"""What a kernel that writes nothing would store: the first 128 fractional bits of pi."""


def instructions_of(cubin: Cubin) -> tuple[Instruction, ...]:
    """Those of the kernel alone: the text holds others."""
    section = re.split(r"^//-+ \.text\.(\w+) +-+$", disassemble(cubin.code), flags=re.MULTILINE)
    return parse_sass(section[section.index(cubin.name) + 1])


def check_direct(cubin: Cubin, mix: Mix, vectors: int) -> None:
    """Every stream by 16-byte accesses, all loads on their way before the first store, nothing in local memory."""
    accesses = [access.opcode for access in memory_accesses(instructions_of(cubin)) if access.space != "constant"]
    # Where nothing is written, one store stands behind the comparison that never holds.
    stores = mix.writes * vectors or 1
    expected = ["LDG.E.128.CONSTANT"] * (mix.reads * vectors) + ["STG.E.128"] * stores
    assert accesses == expected, f"{mix.name} {vectors}: {accesses}"


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_direct_kernels_move_16_bytes_an_access(mix: Mix) -> None:
    for arch, vectors in (("sm_80", 1), ("sm_80", 4), ("sm_90", 2), ("sm_90", 4)):
        cubin = compile_cubin(mover_source(mix, vectors), arch=arch, name="direct")
        check_direct(cubin, mix, vectors)
        assert cubin.spill_load_bytes == cubin.spill_store_bytes == cubin.stack_bytes == 0
        assert cubin.registers <= 64  # two blocks of 512 threads an SM


def test_the_check_rejects_narrow_accesses() -> None:
    source = mover_source(Mix(2, 1), 1).replace("struct alignas(16) vec16", "struct alignas(8) vec16")
    with pytest.raises(AssertionError, match="2R1W 1"):
        check_direct(compile_cubin(source, arch="sm_90", name="direct"), Mix(2, 1), 1)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix.reads], ids=lambda mix: mix.name)
def test_bulk_kernels_use_the_copy_engine(mix: Mix) -> None:
    """One bulk copy a stream (UBLKCP.S.G into shared memory, UBLKCP.G.S out of it), and no other access to global memory that way."""
    kernels = dict.fromkeys(mover.kernel for mover in movers(mix, "sm_90") if mover.kernel != "direct")
    assert list(kernels) == (["bulk_load", "bulk_copy"] if mix.writes else ["bulk_load"])
    for kernel in kernels:
        cubin = compile_cubin(mover_source(mix, 1), arch="sm_90", name=kernel)
        instructions = instructions_of(cubin)
        count = Counter(instruction.opcode for instruction in instructions)
        assert count["UBLKCP.S.G"] == mix.reads
        assert count["UBLKCP.G.S"] == (mix.writes if kernel == "bulk_copy" else 0)
        assert {a.width_bits for a in memory_accesses(instructions) if a.space in ("global", "shared")} <= {128}
        assert not any(op.startswith("LDG") for op in count)
        assert any(op.startswith("STG") for op in count) == (kernel == "bulk_load")
        assert cubin.shared_bytes >= mix.reads * 4096


@pytest.mark.parametrize(("mix", "vectors"), [(Mix(2, 1), 2), (Mix(4, 3), 1)], ids=["2R1W", "4R3W"])
def test_every_output_is_the_xor_of_every_input(mix: Mix, vectors: int) -> None:
    """Run on the CPU, in two blocks of 32 threads: every byte of every stream is moved, none beside them."""
    pitch = 2 * 32 * vectors
    source = torch.randint(-(2**31), 2**31, (mix.reads, pitch, 4), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    target = torch.zeros(mix.writes, pitch, 4, dtype=torch.int32)
    expected = source[0].clone()
    for stream in source[1:]:
        expected ^= stream
    run_on(build(direct_text(mix, vectors)), "direct", (2, 1, 1), (32, 1, 1), [source, target, pitch], outputs=[target])
    assert torch.equal(target, expected.expand_as(target))


def test_a_fill_writes_no_word_twice_in_a_row() -> None:
    target = torch.zeros(64, 4, dtype=torch.int32)
    run_on(build(direct_text(Mix(0, 1), 1)), "direct", (2, 1, 1), (32, 1, 1), [torch.zeros(4), target, 64], outputs=[target])
    words = target.flatten()
    assert (words[1:] != words[:-1]).all()
    assert (target[:, 0] + 1 == -target[:, 1]).all()  # x and ~x: half of the bits are ones


def test_a_read_depends_on_every_byte_that_it_reads() -> None:
    """One vector among zeros makes the sum the key, wherever it stands; then, and only then, the kernel stores."""
    program = build(direct_text(Mix(1, 0), 4))
    pitch = 2 * 32 * 4
    for position in range(0, pitch, 9):
        source, target = torch.zeros(pitch, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        source[position] = KEY
        run_on(program, "direct", (2, 1, 1), (32, 1, 1), [source, target, pitch], outputs=[target])
        assert torch.equal(target, KEY), position
        source[position, position % 4] ^= 1
        target.zero_()
        run_on(program, "direct", (2, 1, 1), (32, 1, 1), [source, target, pitch], outputs=[target])
        assert not target.any(), position


def direct_text(mix: Mix, vectors: int) -> str:
    """The source up to the kernels of the copy engine, which the emulator does not have."""
    return mover_source(mix, vectors).split("#if __CUDA_ARCH__")[0]


def test_the_set_is_fixed() -> None:
    direct = {("direct", vectors, threads) for vectors in (1, 2, 4) for threads in (128, 256, 512)}
    bulk = {("bulk_load", 2, 128), ("bulk_load", 1, 256), ("bulk_copy", 2, 128), ("bulk_copy", 1, 256)}
    as_set = lambda mix, arch: {(m.kernel, m.vectors, m.threads) for m in movers(mix, arch)}  # noqa: E731
    assert as_set(Mix(1, 1), "sm_90") == as_set(Mix(2, 1), "sm_100") == as_set(Mix(2, 1), "sm_120") == direct | bulk
    assert as_set(Mix(1, 1), "sm_80") == as_set(Mix(0, 1), "sm_90") == direct
    assert as_set(Mix(1, 0), "sm_90") == direct | {("bulk_load", 2, 128), ("bulk_load", 1, 256)}


def test_every_block_moves_a_whole_tile_of_each_stream() -> None:
    for mover in movers(Mix(2, 1), "sm_90"):
        assert mover.tile_vectors == (256 if "bulk" in mover.kernel else mover.vectors * mover.threads)
        assert wall._GRAIN_VECTORS % mover.tile_vectors == 0


@pytest.mark.parametrize(
    ("bytes_read", "bytes_written", "name"),
    [
        (4, 4, "1R1W"),  # f32 relu
        (2 + 2, 2, "2R1W"),  # bf16 add
        (4, 2, "2R1W"),  # f32 to bf16
        (2, 1, "2R1W"),  # bf16 to fp8
        (2, 4, "1R2W"),  # bf16 to f32
        (1, 2, "1R2W"),  # int8 to bf16
        (2 + 4, 4, "3R2W"),  # bf16 + f32 to f32
        (4 * 4, 3 * 4, "4R3W"),  # AdamW, f32
        (3 * 2, 2, "3R1W"),
        (4 * 2**20, 4 * 2**20 + 64, "1R1W"),
        (2**20 + 4096, 2**20, "1R1W"),  # a broadcast row
        (4, 0, "1R0W"),
        (0, 4, "0R1W"),
        (8, 1, "1R0W"),  # 0.889 lies nearer to 1 than to 0.75
        (1, 8, "0R1W"),
        (10**30, 10**30, "1R1W"),
    ],
)
def test_bytes_find_the_nearest_mix(bytes_read: int, bytes_written: int, name: str) -> None:
    assert nearest_mix(bytes_read, bytes_written).name == name


@pytest.mark.parametrize("moved", [(0, 0), (-1, 2), (1, -1)])
def test_no_mix_for_bytes_that_do_not_move(moved: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match="bytes that move"):
        nearest_mix(*moved)


def test_the_ceiling_is_the_lowest_median_not_the_lowest_sample() -> None:
    samples = {"steady": (10.0, 10.0, 11.0), "lucky once": (5.0, 12.0, 13.0), "slow": (20.0, 20.0, 20.0)}
    ceiling = find_ceiling(Mix(2, 1), 40_000, samples)
    assert (ceiling.mover, ceiling.time_us, ceiling.samples_us) == ("steady", 10.0, (10.0, 10.0, 11.0))
    assert ceiling.medians_us == {"steady": 10.0, "lucky once": 12.0, "slow": 20.0}
    assert ceiling.bandwidth_gbps == pytest.approx(4.0)  # 40 kB in 10 us


def test_ratios_are_of_equal_bytes() -> None:
    ceiling = Ceiling(Mix(1, 1), 1000, 10.0, "direct 1x256", (10.0,), {"direct 1x256": 10.0})
    assert ceiling.ratio(1000, 10.0) == 1.0
    assert ceiling.ratio(2000, 25.0) == pytest.approx(0.8)  # the wall needs 20 us for 2000 bytes
    assert ceiling.ratio(1000, 9.95) < FAULT_RATIO < ceiling.ratio(1000, 9.85)


def test_a_wall_answers_from_the_mixes_it_has() -> None:
    ceilings = tuple(Ceiling(mix, 600, time, "m", (time,), {"m": time}) for mix, time in ((Mix(1, 1), 3.0), (Mix(2, 1), 2.0)))
    walls = Wall("GPU", ceilings)
    assert walls.ceiling(4, 4) is ceilings[0]
    assert walls.ceiling(6, 2) is ceilings[1]  # 3R1W was not measured
    assert str(walls).splitlines()[2].split() == ["2R1W", "0.3", "GB/s", "2.00", "us", "m"]


def test_less_than_a_tile_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"nbytes is 98303; 2R1W needs at least 98304"):  # 3 streams of 2048 vectors
        prepare_movers(Mix(2, 1), 98303, 0)


def test_without_a_gpu_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (cuda_index, measure_wall):
        with pytest.raises(DeviceError, match=r"torch sees none.*NVIDIA GPU.*nvidia-smi"):
            call()


def test_devices_are_named_as_torch_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [cuda_index(device) for device in (None, 0, 1, "cuda", "cuda:0", torch.device("cuda", 1))] == [1, 0, 1, 1, 0, 1]
    for device in ("cpu", 2, "cuda:2", torch.device("meta")):
        with pytest.raises(DeviceError, match="cuda:0 to cuda:1"):
            cuda_index(device)


def test_names_tell_the_kernels_of_a_set_apart() -> None:
    names = [mover.name for mover in movers(Mix(1, 1), "sm_90")]
    assert Mover("direct", 1, 256).name == "direct 1x256"
    assert len(set(names)) == len(names)
