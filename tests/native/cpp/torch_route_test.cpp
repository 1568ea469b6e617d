#include "native/torch_route.hpp"

#include "rig.hpp"

using namespace exeunt::test;

TEST("torch gets segments under the shared limit, and null beyond it") {
    Rig rig(delayed(), 4 * kPage);
    const Stream stream(rig.device);
    const auto before = torch_stats();
    CHECK(exeunt_torch_malloc(kPage, 0, stream.handle()) == nullptr);  // no route yet
    TorchRoute route(rig.arena);
    CHECK_THROWS(StateError, TorchRoute(rig.arena));
    void* first = exeunt_torch_malloc(2 * kPage + 1, 0, stream.handle());
    CHECK(first != nullptr);
    CHECK_EQUAL(reinterpret_cast<std::uint64_t>(first) % kPage, 0U);
    CHECK(exeunt_torch_malloc(2 * kPage, 0, stream.handle()) == nullptr);
    CHECK(exeunt_torch_malloc(0, 0, stream.handle()) == nullptr);
    CHECK(exeunt_torch_malloc(-1, 0, stream.handle()) == nullptr);
    CHECK(exeunt_torch_malloc(kPage, 1, stream.handle()) == nullptr);
    CHECK_EQUAL(torch_stats().num_refused - before.num_refused, 5U);
    CHECK_EQUAL(rig.arena->stats().budget.used_by_use[2], 3 * kPage);
    CHECK_THROWS(BusyError, rig.arena->close());
    exeunt_torch_free(first, 2 * kPage + 1, 0, stream.handle());
    exeunt_torch_free(nullptr, 0, 0, stream.handle());
    CHECK_EQUAL(torch_stats().num_segments, before.num_segments);
}

TEST("a freed segment is reused only after the work of its stream") {
    Rig rig(delayed(), 2 * kPage);
    const Stream stream(rig.device);
    TorchRoute route(rig.arena);
    void* first = exeunt_torch_malloc(2 * kPage, 0, stream.handle());
    const auto pending = rig.read(reinterpret_cast<cuda::DevicePtr>(first), 100, stream.handle());
    exeunt_torch_free(first, 2 * kPage, 0, stream.handle());
    CHECK_EQUAL(rig.arena->stats().num_draining, 1U);
    void* second = exeunt_torch_malloc(2 * kPage, 0, stream.handle());  // waits for the fence
    CHECK(second != nullptr);
    exeunt_torch_free(second, 2 * kPage, 0, stream.handle());
    rig.check_clean();
}

TEST("torch's need demotes residents") {
    Rig rig({}, 2 * kPage);
    TorchRoute route(rig.arena);
    const auto resident = rig.arena->reserve(2 * kPage, 256, DeviceUse::kWeights);
    resident->commit();
    CHECK(exeunt_torch_malloc(kPage, 0, nullptr) == nullptr);
    CHECK(resident->state() == RangeState::kCommitted);
    resident->set_demotion_order(0);
    void* segment = exeunt_torch_malloc(kPage, 0, nullptr);
    CHECK(segment != nullptr);
    CHECK(resident->state() == RangeState::kReserved);
    exeunt_torch_free(segment, kPage, 0, nullptr);
}

TEST("a segment outlives its route and its arena's handle") {
    void* segment = nullptr;
    {
        Rig rig;
        TorchRoute route(rig.arena);
        segment = exeunt_torch_malloc(kPage, 0, nullptr);
        route.close();
        CHECK(exeunt_torch_malloc(kPage, 0, nullptr) == nullptr);
        const TorchRoute again(rig.arena);
    }
    static_cast<char*>(segment)[kPage - 1] = 1;
    exeunt_torch_free(segment, kPage, 0, nullptr);
}
