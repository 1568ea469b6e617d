#include "native/copy_batch.hpp"

#include "rig.hpp"

using namespace exeunt::test;

TEST("a batch copies behind its fences and is covered by its own") {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
        Rig rig(delayed(seed));
        const WeightFile file(8 * 4096);
        const FileMapping mapping(file.path);
        const HostPages pages(rig.device, const_cast<std::byte*>(mapping.data()), 8 * 4096, true);
        const Stream copies(rig.device);
        const Stream compute(rig.device);
        const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kRing);
        range->commit();
        const CopyBatch first(rig.device, {{mapping.data() + 5, 1000, range->address()},
                                           {mapping.data() + 9000, 10, range->address() + 1000}});
        const CopyBatch second(rig.device, {{mapping.data() + 2000, 1010, range->address()}});
        EventFence ready(rig.device);
        const auto used = std::make_shared<EventFence>(rig.device);
        first.submit(copies.handle(), {}, ready);
        ready.block_stream(compute.handle());
        const auto seen = rig.read(range->address(), 1010, compute.handle());
        used->record(compute.handle());
        second.submit(copies.handle(), {used}, ready);
        CHECK(seen->take() == file.part(5, 1000) + file.part(9000, 10));
        ready.synchronize();
        rig.check_clean();
    }
}

TEST("hostile batches and pages are refused") {
    Rig rig;
    const std::byte byte{};
    const std::size_t huge = ~std::size_t{0};
    CHECK_THROWS(SizeError, CopyBatch(rig.device, {}));
    CHECK_THROWS(SizeError, CopyBatch(rig.device, {{&byte, 0, 1}}));
    CHECK_THROWS(SizeError, CopyBatch(rig.device, {{nullptr, 1, 1}}));
    CHECK_THROWS(SizeError, CopyBatch(rig.device, {{&byte, 1, 0}}));
    CHECK_THROWS(SizeError, CopyBatch(rig.device, {{&byte, huge, 1}}));
    CHECK_THROWS(SizeError, CopyBatch(rig.device, {{&byte, 2, huge}}));
    CHECK_THROWS(SizeError, HostPages(rig.device, nullptr, 4096, true));
    CHECK_THROWS(SizeError,
                 HostPages(rig.device, reinterpret_cast<void*>(4096), std::size_t{100}, true));
    CHECK_THROWS(SizeError, HostPages(rig.device, reinterpret_cast<void*>(4097), 4096, true));
    CHECK_THROWS(SizeError,
                 HostPages(rig.device, reinterpret_cast<void*>(8192), huge - 4095, true));
}

TEST("a batch that fails half-way is fenced") {
    Rig rig(delayed());
    const WeightFile file(4096);
    const FileMapping mapping(file.path);
    auto pages =
        std::make_unique<HostPages>(rig.device, const_cast<std::byte*>(mapping.data()), 4096, true);
    const Stream copies(rig.device);
    const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kRing);
    range->commit();
    const CopyBatch batch(rig.device, {{mapping.data(), 100, range->address()},
                                       {mapping.data(), 100, range->address() + 100}});
    EventFence ready(rig.device);
    // cuCtxGetCurrent, cuCtxPushCurrent, cuCtxGetCurrent, cuMemcpyHtoDAsync, then the second copy
    rig.driver->inject_fault(5, cuda::Status::kUnknown);
    CHECK_THROWS(CudaError, batch.submit(copies.handle(), {}, ready));
    CHECK(rig.driver->fault_was_delivered());
    CHECK(!ready.is_complete());
    ready.synchronize();
    pages.reset();
    rig.check_clean();
}
