#include "rig.hpp"

using namespace exeunt::test;

namespace {

void end_view(dlpack::ManagedTensor* view) { view->deleter(view); }

}  // namespace

TEST("invariant 1: weights, ring and torch segments share one limit") {
    Rig rig({}, 4 * kPage);
    const auto weights = rig.arena->reserve(2 * kPage, 256, DeviceUse::kWeights);
    const auto ring = rig.arena->reserve(kPage, 256, DeviceUse::kRing);
    const auto torch = rig.arena->reserve(kPage, 256, DeviceUse::kTorch);
    const auto more = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    weights->commit();
    ring->commit();
    torch->commit();
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, 4 * kPage);
    CHECK_THROWS(OutOfMemory, more->commit());
    CHECK(more->state() == RangeState::kReserved);
    CHECK_EQUAL(rig.arena->stats().budget.peak_bytes, 4 * kPage);
    weights->demote();
    more->commit();
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, 3 * kPage);
    rig.check_clean();
}

TEST("invariant 3: pages outlast the work that may touch them") {
    Rig rig(delayed());
    const Stream stream(rig.device);
    const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    range->commit();
    const auto copy = rig.read(range->address(), 100, stream.handle());
    range->record_use(stream.handle());
    range->demote();
    CHECK(range->state() == RangeState::kDraining);
    CHECK_EQUAL(rig.arena->collect(), 0U);
    rig.driver->run_all();
    CHECK_EQUAL(rig.arena->collect(), kPage);
    CHECK(range->state() == RangeState::kReserved);
    rig.check_clean();
}

TEST("invariant 3: pages outlast an exported view that holds them") {
    Rig rig;
    const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    range->commit();
    dlpack::ManagedTensor* view = export_view(range, 0, kPage, Hold::kPages);
    range->demote();
    CHECK(range->state() == RangeState::kDraining);
    static_cast<char*>(view->tensor.data)[kPage - 1] = 7;  // still backed
    end_view(view);
    CHECK(range->state() == RangeState::kReserved);
    rig.check_clean();
}

TEST("a view that holds the address lets pages go but not the address") {
    Rig rig;
    auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    range->commit();
    dlpack::ManagedTensor* view = export_view(range, 0, kPage, Hold::kAddress);
    const auto address = range->address();
    range->demote();
    CHECK(range->state() == RangeState::kReserved);
    range->commit();
    CHECK_EQUAL(reinterpret_cast<cuda::DevicePtr>(view->tensor.data), address);
    range->retire();
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, 0U);
    const auto other = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    CHECK(other->address() != address);
    end_view(view);
    CHECK(range->state() == RangeState::kRetired);
}

TEST("a view outlives the range's handle, the arena's and the device's") {
    dlpack::ManagedTensor* view = nullptr;
    std::shared_ptr<FakeDriver> driver;
    {
        Rig rig;
        const auto range = rig.arena->reserve(100, 256, DeviceUse::kWeights);
        range->commit();
        view = export_view(range, 10, 20, Hold::kPages);
        driver = rig.driver;
    }
    static_cast<char*>(view->tensor.data)[19] = 1;
    CHECK_EQUAL(view->tensor.shape[0], 20);
    end_view(view);
    for (const auto& [name, count] : driver->driver_objects()) {
        CHECK_EQUAL(count, 0U);
    }
}

TEST("a range dropped under pending work is unmapped when the work is done") {
    Rig rig(delayed());
    const Stream stream(rig.device);
    std::unique_ptr<Readback> copy;
    {
        const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
        range->commit();
        copy = rig.read(range->address(), 100, stream.handle());
        range->record_use(stream.handle());
    }
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, kPage);
    rig.driver->run_all();
    CHECK_EQUAL(rig.arena->collect(), kPage);
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, 0U);
    rig.check_clean();
}

TEST("commit takes a draining range back with its contents") {
    Rig rig(delayed());
    const Stream stream(rig.device);
    const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    range->commit();
    *reinterpret_cast<char*>(range->address()) = 'w';
    CHECK(rig.driver->launch(stream.handle(), 1.0) == cuda::Status::kSuccess);
    range->record_use(stream.handle());
    range->demote();
    CHECK(range->state() == RangeState::kDraining);
    range->commit();
    rig.driver->run_all();
    (void)rig.arena->collect();
    CHECK(range->state() == RangeState::kCommitted);
    CHECK_EQUAL(*reinterpret_cast<char*>(range->address()), 'w');
}

TEST("pressure demotes in the given order, after fences, never what is acquired") {
    Rig rig(delayed(), 3 * kPage);
    const Stream stream(rig.device);
    std::vector<std::shared_ptr<Range>> ranges;
    for (const std::int64_t order : {2, 1, 0}) {
        ranges.push_back(rig.arena->reserve(kPage, 256, DeviceUse::kWeights));
        ranges.back()->commit();
        ranges.back()->set_demotion_order(order);
    }
    CHECK(ranges[2]->acquire());  // first in order, but in use
    const auto copy = rig.read(ranges[1]->address(), 100, stream.handle());
    ranges[1]->record_use(stream.handle());
    const auto wanted = rig.arena->reserve(kPage, 256, DeviceUse::kTorch);
    wanted->commit();
    CHECK(ranges[0]->state() == RangeState::kCommitted);
    CHECK(ranges[1]->state() == RangeState::kReserved);
    CHECK(ranges[2]->state() == RangeState::kCommitted);
    const auto events = rig.arena->take_pressure_events();
    CHECK_EQUAL(events.size(), 1U);
    CHECK(events[0].was_met);
    CHECK_EQUAL(events[0].freed_bytes, kPage);
    CHECK_EQUAL(events[0].demoted_range_ids.front(), ranges[1]->id());
    CHECK(!ranges[1]->acquire());
    ranges[2]->release(stream.handle());
    rig.check_clean();
}

TEST("invariant 12: a request above the limit fails with its numbers and demotes nothing") {
    Rig rig({}, 2 * kPage);
    const auto resident = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    resident->commit();
    resident->set_demotion_order(0);
    const auto wanted = rig.arena->reserve(3 * kPage, 256, DeviceUse::kTorch);
    try {
        wanted->commit();
        CHECK(false);
    } catch (const OutOfMemory& error) {
        CHECK_EQUAL(error.requested_bytes, 3 * kPage);
        CHECK_EQUAL(error.free_bytes, kPage);
        CHECK_EQUAL(error.limit_bytes, 2 * kPage);
    }
    CHECK(resident->state() == RangeState::kCommitted);
}

TEST("a device fuller than the limit knows is relieved in the same way") {
    FakeOptions options;
    options.total_bytes = 2 * kPage;
    Rig rig(options, 8 * kPage);
    const auto resident = rig.arena->reserve(2 * kPage, 256, DeviceUse::kWeights);
    resident->commit();
    resident->set_demotion_order(0);
    const auto wanted = rig.arena->reserve(kPage, 256, DeviceUse::kTorch);
    wanted->commit();
    CHECK(resident->state() == RangeState::kReserved);
    const auto hopeless = rig.arena->reserve(2 * kPage, 256, DeviceUse::kTorch);
    CHECK_THROWS(OutOfMemory, hopeless->commit());
    CHECK(wanted->state() == RangeState::kCommitted);
}

TEST("small ranges share pages by use, and the last one out frees them") {
    Rig rig;
    std::vector<std::shared_ptr<Range>> ranges;
    for (int index = 0; index < 16; ++index) {
        ranges.push_back(rig.arena->reserve(1000, 512, DeviceUse::kWeights));
        ranges.back()->commit();
        CHECK_EQUAL(ranges.back()->address() % 512, 0U);
    }
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, kPage);
    const auto other = rig.arena->reserve(1000, 256, DeviceUse::kTorch);
    other->commit();
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, 2 * kPage);
    ranges.resize(1);
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, 2 * kPage);
    ranges.clear();
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, kPage);
    other->retire();
    CHECK_EQUAL(rig.arena->stats().free_address_bytes, rig.arena->stats().address_bytes);
}

TEST("every second range freed leaves room for half of the free sum") {
    Rig rig({}, 64 * kPage);
    std::vector<std::shared_ptr<Range>> ranges;
    for (int index = 0; index < 64; ++index) {
        ranges.push_back(rig.arena->reserve(kPage, 256, DeviceUse::kWeights));
        ranges.back()->commit();
    }
    for (std::size_t index = 0; index < ranges.size(); index += 2) {
        ranges[index].reset();
    }
    const auto large = rig.arena->reserve(32 * kPage, 256, DeviceUse::kWeights);
    large->commit();
    CHECK_EQUAL(rig.arena->stats().budget.used_bytes, 64 * kPage);
}

TEST("invariant 8: hostile sizes are refused and change nothing") {
    Rig rig;
    const std::size_t huge = std::size_t{1} << 63;
    CHECK_THROWS(SizeError, (void)rig.arena->reserve(0, 256, DeviceUse::kWeights));
    CHECK_THROWS(SizeError, (void)rig.arena->reserve(~std::size_t{0}, 256, DeviceUse::kWeights));
    CHECK_THROWS(OutOfMemory, (void)rig.arena->reserve(huge, 256, DeviceUse::kWeights));
    CHECK_THROWS(SizeError, (void)rig.arena->reserve(1, 0, DeviceUse::kWeights));
    CHECK_THROWS(SizeError, (void)rig.arena->reserve(1, 3, DeviceUse::kWeights));
    CHECK_THROWS(SizeError, (void)rig.arena->reserve(1, 2 * kPage, DeviceUse::kWeights));
    CHECK_THROWS(SizeError, Arena(rig.device, ArenaOptions{0, kPage}));
    CHECK_THROWS(SizeError, Arena(rig.device, ArenaOptions{~std::size_t{0}, kPage}));
    const auto range = rig.arena->reserve(100, 256, DeviceUse::kWeights);
    CHECK_THROWS(StateError, (void)export_view(range, 0, 1, Hold::kPages));
    range->commit();
    CHECK_THROWS(SizeError, (void)export_view(range, 0, 101, Hold::kPages));
    CHECK_THROWS(SizeError, (void)export_view(range, 100, 1, Hold::kPages));
    CHECK_THROWS(SizeError, (void)export_view(range, 1, ~std::size_t{0}, Hold::kPages));
    CHECK_THROWS(SizeError, (void)export_view(range, huge, huge, Hold::kPages));
    CHECK_EQUAL(rig.arena->stats().num_ranges, 1U);
}

TEST("what is retired or closed says so") {
    Rig rig;
    const auto range = rig.arena->reserve(100, 256, DeviceUse::kWeights);
    range->commit();
    CHECK_THROWS(StateError, range->release(nullptr));
    CHECK(range->acquire());
    CHECK_THROWS(BusyError, range->retire());
    CHECK_THROWS(BusyError, rig.arena->close());
    range->release(nullptr);
    range->retire();
    CHECK_THROWS(StateError, range->retire());
    CHECK_THROWS(StateError, range->commit());
    CHECK_THROWS(StateError, (void)range->acquire());
    CHECK_THROWS(StateError, range->record_use(nullptr));
    CHECK_THROWS(StateError, (void)range->address());
    const auto open = rig.arena->reserve(100, 256, DeviceUse::kWeights);
    open->commit();
    rig.arena->close();
    rig.arena->close();
    CHECK(open->state() == RangeState::kRetired);
    CHECK_THROWS(StateError, (void)rig.arena->reserve(1, 256, DeviceUse::kWeights));
    CHECK_THROWS(StateError, open->commit());
}

TEST("invariant 10: close waits for the work and gives everything back") {
    Rig rig(delayed());
    const Stream stream(rig.device);
    const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    range->commit();
    const auto copy = rig.read(range->address(), kPage, stream.handle());
    range->record_use(stream.handle());
    rig.arena->close();
    for (const auto& [name, count] : rig.driver->driver_objects()) {
        if (name == "reservations" || name == "mappings" || name == "device_bytes") {
            CHECK_EQUAL(count, 0U);
        }
    }
    rig.check_clean();
}

TEST("invariant 3: a view that names its streams outlasts their work when it is dropped") {
    Rig rig(delayed());
    const Stream stream(rig.device);
    dlpack::ManagedTensor* view = nullptr;
    {
        const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
        range->commit();
        view = export_view(range, 0, kPage, Hold::kPages, {{stream.handle(), nullptr}});
    }
    const auto copy =
        rig.read(reinterpret_cast<cuda::DevicePtr>(view->tensor.data), kPage, stream.handle());
    end_view(view);
    CHECK_EQUAL(rig.arena->collect(), 0U);
    rig.driver->run_all();
    CHECK_EQUAL(rig.arena->collect(), kPage);
    rig.check_clean();
}

TEST("a view keeps the streams that it owns until it ends") {
    Rig rig(delayed());
    auto stream = std::make_shared<Stream>(rig.device);
    const auto range = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    range->commit();
    dlpack::ManagedTensor* view =
        export_view(range, 0, kPage, Hold::kPages, {{stream->handle(), stream}});
    stream.reset();
    end_view(view);
    rig.driver->run_all();
    rig.check_clean();
}
