#include "native/copy_batch.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

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

TEST("pages of a private file mapping are refused without asking the driver") {
    Rig rig;
    const WeightFile file(8 * 4096);
    const int descriptor = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    void* mapped = mmap(nullptr, 8 * 4096, PROT_READ, MAP_PRIVATE, descriptor, 0);
    CHECK(mapped != MAP_FAILED);
    const std::uint64_t num_calls = rig.driver->num_calls();
    for (const bool is_read_only : {true, false}) {
        try {
            const HostPages pages(rig.device, static_cast<char*>(mapped) + 4096, 4096,
                                  is_read_only);
            CHECK(false);
        } catch (const CudaError& error) {
            CHECK(error.status == cuda::Status::kNotSupported);
        }
    }
    CHECK_EQUAL(rig.driver->num_calls(), num_calls);
    munmap(mapped, 8 * 4096);
    close(descriptor);
    std::vector<std::byte> anonymous(3 * 4096);
    const auto first = reinterpret_cast<std::uintptr_t>(anonymous.data());
    const HostPages pages(rig.device, reinterpret_cast<void*>((first + 4095) / 4096 * 4096), 4096,
                          false);
}
