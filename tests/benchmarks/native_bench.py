"""Figures of the native library on a GPU, each beside what it is held against.

    python tests/benchmarks/native_bench.py --file-gib 8 --output native.json

Needs a CUDA device, torch, and a writable folder with room for the file. Nothing here is a
test: the numbers go to `docs/explanation/native.md` with the hardware and the date.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import native

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def anonymous_bytes() -> int:
    """Memory of this process that belongs to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise OSError("/proc/self/status has no RssAnon")


def write_file(path: Path, nbytes: int) -> None:
    """A file of pseudo-random bytes, in the page cache when this returns."""
    block = os.urandom(64 * MIB)
    with path.open("wb") as file:
        for _ in range(nbytes // len(block)):
            file.write(block)


def registration(
    device: native.Device, path: Path, out: dict[str, Any]
) -> tuple[native.HostSource, native.HostBudget]:
    """Register the whole file; rate, and what it costs in anonymous memory."""
    nbytes = path.stat().st_size
    budget = native.HostBudget(limit_bytes=nbytes + GIB)
    source = native.HostSource(device, budget, native.FileMapping(str(path)))
    before = anonymous_bytes()
    start = time.perf_counter()
    result = source.register_pages(0, nbytes)
    elapsed_s = time.perf_counter() - start
    out["registration"] = {
        "outcome": result.outcome.name,
        "status": result.status_name,
        "file_GiB": nbytes / GIB,
        "GB_per_s": nbytes / elapsed_s / 1e9,
        "anonymous_MiB": (anonymous_bytes() - before) / MIB,
    }
    return source, budget


def copy_rate(
    arena: native.Arena, source: native.HostSource, budget: native.HostBudget, out: dict[str, Any]
) -> None:
    """A 64 MiB unit of 10 separate ranges against one raw copy of as many pinned bytes."""
    device = arena.device
    nbytes, parts, repeats = 64 * MIB, 10, 48
    stream = torch.cuda.Stream()
    compute = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def raw() -> float:
        with torch.cuda.stream(stream):
            begin.record()
            for _ in range(repeats):
                target.copy_(pinned, non_blocking=True)
            end.record()
        end.synchronize()
        return repeats * nbytes / (begin.elapsed_time(end) / 1e3) / 1e9

    ring = native.TransferRing(
        arena, num_slots=4, slot_nbytes=nbytes, copy_stream=stream.cuda_stream
    )
    piece = nbytes // parts // 256 * 256
    units = []
    for index in range(8):
        items = []
        for part in range(parts):  # a gap between ranges, so that none is merged
            offset = index * 2 * nbytes + part * (piece + 4096)
            size = piece if part < parts - 1 else nbytes - piece * (parts - 1)
            items.append((source, offset, size, part * piece))
        units.append(native.Unit(items))

    def ringed() -> float:
        begin.record(stream)
        for step in range(repeats):
            ticket = ring.try_submit(units[step % len(units)])
            assert ticket is not None
            ring.acquire(ticket, compute.cuda_stream)
            ring.release(ticket, compute.cuda_stream)
        end.record(stream)
        end.synchronize()
        return repeats * nbytes / (begin.elapsed_time(end) / 1e3) / 1e9

    raw(), ringed()
    pairs = [(raw(), ringed()) for _ in range(7)]
    torch.cuda.synchronize()
    stats = ring.stats()
    out["copy_64MiB_unit"] = {
        "raw_pinned_GB_per_s": statistics.median(rate for rate, _ in pairs),
        "ring_GB_per_s": statistics.median(rate for _, rate in pairs),
        "ratio_of_medians": statistics.median(rate for _, rate in pairs)
        / statistics.median(rate for rate, _ in pairs),
        "by_its_own_events_GB_per_s": stats.copies.nbytes / stats.copies.milliseconds / 1e6,
        "num_unmeasured": stats.copies.num_unmeasured,
    }
    ring.close()
    seen = native.Readback(device, budget, nbytes)
    memory = arena.reserve(nbytes)
    memory.commit()
    native.upload(memory, units[0], stream.cuda_stream).block_stream(compute.cuda_stream)
    seen.enqueue(memory.address, nbytes, compute.cuda_stream)
    out["copy_64MiB_unit"]["is_bit_exact"] = seen.take()[:MIB] == read_at(out, 0, MIB)


def read_at(out: dict[str, Any], offset: int, nbytes: int) -> bytes:
    """The file's own bytes."""
    with Path(out["file"]).open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def host_time(arena: native.Arena, source: native.HostSource, out: dict[str, Any]) -> None:
    """Host time of the three calls that a unit costs, by how many units are measured.

    Means without the slowest tenth: a median would hide what one call in four costs more.
    """
    stream, compute = torch.cuda.Stream(), torch.cuda.Stream()
    unit = native.Unit([(source, part * 2 * MIB, 64 * KIB, part * 64 * KIB) for part in range(10)])
    one = native.Unit([(source, 0, 640 * KIB, 0)])
    report: dict[str, Any] = {}
    for label, timing_interval in (("default", 4), ("all_measured", 1), ("unmeasured", 0)):
        ring = native.TransferRing(
            arena,
            num_slots=8,
            slot_nbytes=MIB,
            copy_stream=stream.cuda_stream,
            timing_interval=timing_interval,
        )
        ring_use = ring  # bound for the closures below

        def cycle(
            wanted: native.Unit, ring: native.TransferRing = ring_use
        ) -> tuple[float, float, float]:
            start = time.perf_counter()
            ticket = ring.try_submit(wanted)
            submitted = time.perf_counter()
            assert ticket is not None
            ring.acquire(ticket, compute.cuda_stream)
            acquired = time.perf_counter()
            ring.release(ticket, compute.cuda_stream)
            released = time.perf_counter()
            return submitted - start, acquired - submitted, released - acquired

        for wanted, name in ((unit, "10_ranges"), (one, "1_range")):
            times: list[tuple[float, float, float]] = []
            for index in range(2000):
                times.append(cycle(wanted))
                if index % 8 == 7:
                    torch.cuda.synchronize()  # measures the call, not a full queue
            report[f"{name}_{label}_us"] = {
                call: round(statistics.mean(sorted(column)[: len(column) * 9 // 10]) * 1e6, 2)
                for call, column in zip(
                    ("submit", "acquire", "release"), zip(*times[200:], strict=True), strict=True
                )
            }
        ring.close()
    batch = native.CopyBatch(
        arena.device, [(address, 64 * KIB, target) for address, target in batch_parts(arena, out)]
    )
    ready = native.EventFence(arena.device)
    submits = []
    for index in range(1000):
        start = time.perf_counter()
        batch.submit(stream.cuda_stream, [], ready)
        submits.append(time.perf_counter() - start)
        if index % 8 == 7:
            torch.cuda.synchronize()
    report["batch_10_us"] = round(statistics.median(submits) * 1e6, 2)
    out["host_time"] = report
    out["keep"].clear()


def batch_parts(arena: native.Arena, out: dict[str, Any]) -> list[tuple[int, int]]:
    """Ten pinned host addresses and ten device addresses."""
    pinned = torch.empty(20 * MIB, dtype=torch.uint8, pin_memory=True)
    memory = arena.reserve(MIB)
    memory.commit()
    out["keep"] += [pinned, memory]
    return [(pinned.data_ptr() + 2 * MIB * i, memory.address + 64 * KIB * i) for i in range(10)]


def commit_cost(arena: native.Arena, out: dict[str, Any]) -> None:
    """Host time of commit and demote, which unmaps at once when nothing is pending."""
    report = {}
    for mib in (2, 32, 256):
        memory = arena.reserve(mib * MIB)
        commits, demotes = [], []
        for _ in range(30):
            start = time.perf_counter()
            memory.commit()
            middle = time.perf_counter()
            memory.demote()
            demotes.append(time.perf_counter() - middle)
            commits.append(middle - start)
        report[f"{mib}MiB_us"] = {
            "commit": round(statistics.median(commits) * 1e6, 1),
            "demote": round(statistics.median(demotes) * 1e6, 1),
        }
    out["commit_demote"] = report


def work() -> torch.Tensor:
    """A chain of products and activations that allocates as it goes."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    y = x
    for _ in range(20):
        y = torch.nn.functional.gelu(y @ x) / 64
    return y


def torch_overhead(arena: native.Arena, out: dict[str, Any]) -> None:
    """The same work of torch in its own memory and in the arena's, alternating."""
    from ddo.backend import _torch_allocator

    def timed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(10):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    route = native.TorchRoute(arena)
    pool = torch.cuda.MemPool(_torch_allocator())
    own, pooled = [], []
    for round_number in range(12):
        own.append(timed())
        with torch.cuda.use_mem_pool(pool):
            pooled.append(timed())
        if round_number == 1:
            own.clear(), pooled.clear()
    out["torch_overhead"] = {
        "own_ms": statistics.median(own),
        "arena_ms": statistics.median(pooled),
        "ratio": statistics.median(pooled) / statistics.median(own),
        "segments": native.torch_stats().num_segments,
        "segment_MiB": native.torch_stats().segment_bytes / MIB,
    }
    with torch.cuda.use_mem_pool(pool):
        try:
            torch.empty(arena.stats().limit_bytes, dtype=torch.uint8, device="cuda")
            out["torch_overhead"]["beyond_limit"] = "no error"
        except torch.OutOfMemoryError:
            out["torch_overhead"]["beyond_limit"] = "torch.OutOfMemoryError"
        after = float((torch.ones(1000, device="cuda") * 2).sum())
    out["torch_overhead"]["usable_after"] = after == 2000.0
    del pool
    torch.cuda.synchronize()
    route.close()
    arena.collect()
    out["torch_overhead"]["segments_after"] = native.torch_stats().num_segments


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file-gib", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.cuda.init()
    # Torch's own streams, kernels and workspaces take device memory at first use: before the
    # first look at what is free.
    [torch.cuda.Stream() for _ in range(40)]
    work()
    float((torch.ones(1000, device="cuda") * 2).sum())
    pinned = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    torch.empty(MIB, dtype=torch.uint8, device="cuda").copy_(pinned, non_blocking=True)
    del pinned
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    driver = native.open_driver()
    device = native.Device(driver)
    out: dict[str, Any] = {
        "gpu": device.name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "granularity_MiB": device.granularity / MIB,
        "has_read_only_registration": device.has_read_only_registration,
        "keep": [],
    }
    free_before = device.memory_info()[0]
    arena = native.Arena(device, limit_bytes=4 * GIB, reserve_bytes=64 * GIB)
    commit_cost(arena, out)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "weights.bin"
        out["file"] = str(path)
        write_file(path, arguments.file_gib * GIB)
        source, budget = registration(device, path, out)
        copy_rate(arena, source, budget, out)
        torch.cuda.empty_cache()
        host_time(arena, source, out)
        source.release()
        del source, budget
    torch_overhead(arena, out)
    torch.cuda.synchronize()
    arena.close()
    torch.cuda.empty_cache()
    out["free_MiB"] = {"before": free_before / MIB, "after": device.memory_info()[0] / MIB}
    out["live_objects"] = {name: n for name, n in native.live_objects().items() if n}
    out["leaks"] = native.leaks()
    del out["keep"], out["file"]
    text = json.dumps(out, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
