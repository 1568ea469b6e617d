#include "rig.hpp"

using namespace exeunt::test;

namespace {

constexpr std::size_t kSlot = 40'000;

struct RingRig : Rig {
    explicit RingRig(FakeOptions options = delayed(), std::size_t num_slots = 2,
                     std::shared_ptr<StagingRing> staging = nullptr)
        : Rig(options, 128 * kPage),
          file(200'000),
          source(open(file.path)),
          copies(device),
          compute(device),
          ring(std::make_shared<TransferRing>(arena, RingOptions{num_slots, kSlot, 1},
                                              copies.handle(), std::move(staging))) {}

    std::shared_ptr<const Unit> unit(std::size_t offset, std::size_t nbytes) const {
        return std::make_shared<const Unit>(std::vector<UnitItem>{{source, offset, nbytes, 0}});
    }
    std::unique_ptr<Readback> consume(Ticket ticket, std::size_t nbytes) const {
        ring->acquire(ticket, compute.handle());
        auto readback = read(ring->slot_address(ring->slot_of(ticket)), nbytes, compute.handle());
        ring->release(ticket, compute.handle());
        return readback;
    }

    WeightFile file;
    std::shared_ptr<HostSource> source;
    Stream copies;
    Stream compute;
    std::shared_ptr<TransferRing> ring;
};

}  // namespace

TEST("invariant 2: a slot is not written while a reader's fence is incomplete") {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        RingRig rig(delayed(seed), 1);
        (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
        std::vector<std::unique_ptr<Readback>> seen;
        for (std::size_t step = 0; step < 6; ++step) {
            const auto ticket = rig.ring->try_submit(rig.unit(step * 30'000, 30'000));
            CHECK(ticket.has_value());
            seen.push_back(rig.consume(*ticket, 30'000));
        }
        CHECK(rig.driver->num_pending() > 0);
        for (std::size_t step = 0; step < 6; ++step) {
            CHECK(seen[step]->take() == rig.file.part(step * 30'000, 30'000));
        }
        rig.check_clean();
    }
}

TEST("invariant 4: a source released under its pending copy stays registered until it is done") {
    RingRig rig;
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    std::optional<Ticket> ticket;
    {
        const auto unit = rig.unit(777, 30'000);
        ticket = rig.ring->try_submit(unit);
    }
    rig.source->release();
    rig.source.reset();
    CHECK(rig.host_budget->snapshot().used_bytes > 0);
    CHECK(rig.consume(*ticket, 30'000)->take() == rig.file.part(777, 30'000));
    rig.check_clean();
    rig.ring->close();
    CHECK_EQUAL(rig.host_budget->snapshot().used_bytes, 0U);
}

TEST("invariant 5: submitting, waiting and releasing never synchronise") {
    RingRig rig(delayed(), 3);
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    for (int step = 0; step < 12; ++step) {
        const auto ticket = rig.ring->try_submit(rig.unit(1000, 2000));
        rig.ring->acquire(*ticket, rig.compute.handle());
        rig.ring->release(*ticket, rig.compute.handle());
    }
    // A synchronising call would have run something.
    CHECK(rig.driver->num_pending() >= 12 * 5);
}

TEST("a slot goes through its states in order") {
    RingRig rig(delayed(), 1);
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    CHECK(rig.ring->state(0) == SlotState::kFree);
    const Ticket ticket = *rig.ring->try_submit(rig.unit(0, 100));
    CHECK(rig.ring->state(0) == SlotState::kFilling);
    CHECK(!rig.ring->try_submit(rig.unit(0, 100)));
    rig.driver->run_all();
    CHECK(rig.ring->state(0) == SlotState::kReady);
    rig.ring->acquire(ticket, rig.compute.handle());
    CHECK(rig.ring->state(0) == SlotState::kInUse);
    CHECK(!rig.ring->try_submit(rig.unit(0, 100)));
    rig.ring->release(ticket, rig.compute.handle());
    CHECK(rig.ring->state(0) == SlotState::kDraining);
    rig.driver->run_all();
    CHECK(rig.ring->state(0) == SlotState::kFree);
    CHECK(rig.ring->is_current(ticket));
    CHECK_EQUAL(rig.ring->stats().num_full, 2U);
}

TEST("a unit that is still in its slot is acquired again without a copy") {
    RingRig rig;
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    const Ticket ticket = *rig.ring->try_submit(rig.unit(500, 1000));
    CHECK(rig.consume(ticket, 1000)->take() == rig.file.part(500, 1000));
    CHECK(rig.consume(ticket, 1000)->take() == rig.file.part(500, 1000));
    CHECK_EQUAL(rig.ring->stats().num_copies, 1U);
    (void)rig.ring->try_submit(rig.unit(0, 10));
    (void)rig.ring->try_submit(rig.unit(0, 10));
    CHECK(!rig.ring->is_current(ticket));
    CHECK_THROWS(StateError, rig.ring->acquire(ticket, rig.compute.handle()));
}

TEST("two streams may read one slot, and its refill waits for both") {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        RingRig rig(delayed(seed), 1);
        (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
        const Stream other(rig.device);
        const Ticket ticket = *rig.ring->try_submit(rig.unit(0, 30'000));
        rig.ring->acquire(ticket, rig.compute.handle());
        rig.ring->acquire(ticket, other.handle());
        const auto first = rig.read(rig.ring->slot_address(0), 30'000, rig.compute.handle());
        const auto second = rig.read(rig.ring->slot_address(0), 30'000, other.handle());
        rig.ring->release(ticket, rig.compute.handle());
        CHECK(!rig.ring->try_submit(rig.unit(40'000, 30'000)));
        rig.ring->release(ticket, other.handle());
        (void)*rig.ring->try_submit(rig.unit(40'000, 30'000));
        CHECK(first->take() == rig.file.part(0, 30'000));
        CHECK(second->take() == rig.file.part(0, 30'000));
        rig.check_clean();
    }
}

TEST("neighbours in file and slot become one copy") {
    RingRig rig;
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    const auto unit = std::make_shared<const Unit>(std::vector<UnitItem>{
        {rig.source, 300, 100, 200}, {rig.source, 100, 200, 0}, {rig.source, 400, 50, 512}});
    const Ticket ticket = *rig.ring->try_submit(unit);
    CHECK_EQUAL(rig.ring->stats().num_copies, 2U);
    CHECK_EQUAL(rig.ring->stats().num_merged, 1U);
    const std::string seen = rig.consume(ticket, 562)->take();
    CHECK(seen.substr(0, 300) == rig.file.part(100, 300));
    CHECK(seen.substr(512) == rig.file.part(400, 50));
}

TEST("a unit across registration windows is split where they meet") {
    RingRig rig;
    CHECK(rig.source->register_pages(0, 200'000, 4096).outcome == TierOutcome::kComplete);
    const Ticket ticket = *rig.ring->try_submit(rig.unit(4000, 10'000));
    CHECK_EQUAL(rig.ring->stats().num_copies, 4U);
    CHECK(rig.consume(ticket, 10'000)->take() == rig.file.part(4000, 10'000));
    rig.check_clean();
}

TEST("pageable bytes arrive too and are counted") {
    RingRig rig;
    const Ticket ticket = *rig.ring->try_submit(rig.unit(4000, 10'000));
    CHECK(rig.consume(ticket, 10'000)->take() == rig.file.part(4000, 10'000));
    CHECK_EQUAL(rig.ring->stats().pageable_bytes, 10'000U);
}

TEST("bytes beyond the pinned part come through the staging ring") {
    for (const bool prefers_direct : {false, true}) {
        for (std::uint64_t seed = 0; seed < 5; ++seed) {
            RingRig rig(delayed(seed), 3, nullptr);
            const auto staging = std::make_shared<StagingRing>(
                rig.device, rig.host_budget, StagingOptions{3, 8192, 2, prefers_direct});
            const auto ring = std::make_shared<TransferRing>(rig.arena, RingOptions{3, kSlot, 1},
                                                             rig.copies.handle(), staging);
            (void)rig.source->register_pages(50'000, 20'000, std::size_t{1} << 20);
            for (std::size_t step = 0; step < 12; ++step) {
                const std::size_t offset = 1234 + step * 13'001;
                const auto ticket = ring->try_submit(rig.unit(offset, 33'333));
                CHECK(ticket.has_value());
                ring->acquire(*ticket, rig.compute.handle());
                const auto seen = rig.read(ring->slot_address(ring->slot_of(*ticket)), 33'333,
                                           rig.compute.handle());
                ring->release(*ticket, rig.compute.handle());
                CHECK(seen->take() == rig.file.part(offset, 33'333));
            }
            CHECK(ring->stats().staged_bytes > 0);
            CHECK(ring->stats().staged_bytes < ring->stats().copied_bytes);
            rig.check_clean();
        }
    }
}

TEST("a staged unit whose file was cut fails where it is acquired, and the ring goes on") {
    RingRig rig;
    const auto staging = std::make_shared<StagingRing>(rig.device, rig.host_budget,
                                                       StagingOptions{2, 4096, 1, false});
    const auto ring = std::make_shared<TransferRing>(rig.arena, RingOptions{1, kSlot, 1},
                                                     rig.copies.handle(), staging);
    const WeightFile cut(50'000);
    const auto source = rig.open(cut.path);
    CHECK(truncate(cut.path.c_str(), 1000) == 0);
    const auto unit = std::make_shared<const Unit>(std::vector<UnitItem>{{source, 0, 30'000, 0}});
    const Ticket ticket = *ring->try_submit(unit);
    CHECK_THROWS(FileChanged, ring->acquire(ticket, rig.compute.handle()));
    CHECK(!ring->is_current(ticket));
    const Ticket next = *ring->try_submit(rig.unit(0, 30'000));
    ring->acquire(next, rig.compute.handle());
    const auto seen = rig.read(ring->slot_address(0), 30'000, rig.compute.handle());
    ring->release(next, rig.compute.handle());
    CHECK(seen->take() == rig.file.part(0, 30'000));
}

TEST("an upload fills a resident, and its source may go at once") {
    RingRig rig;
    (void)rig.source->register_pages(0, 100'000, std::size_t{1} << 20);
    const auto range = rig.arena->reserve(150'000, 256, DeviceUse::kWeights);
    const auto unit = rig.unit(10, 150'000);
    CHECK_THROWS(StateError, (void)upload(range, unit, rig.copies.handle(), nullptr));
    range->commit();
    const auto done = upload(range, unit, rig.copies.handle(), nullptr);
    rig.source->release();
    CHECK(!done->is_complete());
    range->demote();
    CHECK(range->state() == RangeState::kDraining);
    range->commit();
    done->block_stream(rig.compute.handle());
    CHECK(rig.read(range->address(), 150'000, rig.compute.handle())->take() ==
          rig.file.part(10, 150'000));
    CHECK_THROWS(SizeError, (void)upload(range, rig.unit(0, 150'001), nullptr, nullptr));
    rig.check_clean();
}

TEST("stalls and copies are measured in device time") {
    RingRig rig(delayed(), 2);
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    for (int step = 0; step < 4; ++step) {
        const Ticket ticket = *rig.ring->try_submit(rig.unit(0, 40'000));
        rig.ring->acquire(ticket, rig.compute.handle());
        rig.ring->release(ticket, rig.compute.handle());
    }
    rig.driver->run_all();
    const RingStats stats = rig.ring->stats();
    CHECK_EQUAL(stats.copies.num_measured, 4U);
    CHECK_EQUAL(stats.copies.nbytes, 160'000U);
    CHECK_EQUAL(stats.stalls.num_measured, 4U);
    CHECK(stats.copies.milliseconds > 0);
    // Nothing computes here, so the consumer waits for all that is copied.
    CHECK(stats.stalls.milliseconds > 0.9 * stats.copies.milliseconds);
}

TEST("one unit in four is measured unless more is asked for") {
    RingRig rig(delayed(), 20);
    const auto ring = std::make_shared<TransferRing>(
        rig.arena, RingOptions{.num_slots = 20, .slot_nbytes = kSlot}, rig.copies.handle(),
        nullptr);
    for (int step = 0; step < 20; ++step) {
        (void)*ring->try_submit(rig.unit(0, 1000));
    }
    rig.driver->run_all();
    CHECK_EQUAL(ring->stats().copies.num_measured, 5U);
    CHECK_EQUAL(ring->stats().copies.num_unmeasured, 15U);
}

TEST("more units in flight than can be timed are moved unmeasured") {
    RingRig rig(delayed(), 100);
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    for (int step = 0; step < 100; ++step) {
        (void)*rig.ring->try_submit(rig.unit(0, 1000));
    }
    rig.driver->run_all();
    CHECK_EQUAL(rig.ring->stats().copies.num_measured, 64U);
    CHECK_EQUAL(rig.ring->stats().copies.num_unmeasured, 36U);
}

TEST("hostile rings, units and tickets are refused") {
    RingRig rig;
    const std::size_t huge = std::size_t{1} << 63;
    const cuda::Stream stream = rig.copies.handle();
    CHECK_THROWS(SizeError, TransferRing(rig.arena, {0, kSlot, 0}, stream, nullptr));
    CHECK_THROWS(SizeError, TransferRing(rig.arena, {2, 0, 0}, stream, nullptr));
    CHECK_THROWS(SizeError, TransferRing(rig.arena, {1U << 20, kSlot, 0}, stream, nullptr));
    CHECK_THROWS(SizeError, TransferRing(rig.arena, {2, huge, 0}, stream, nullptr));
    CHECK_THROWS(SizeError, TransferRing(rig.arena, {2, ~std::size_t{0}, 0}, stream, nullptr));
    CHECK_THROWS(OutOfMemory, TransferRing(rig.arena, {60'000, kSlot, 0}, stream, nullptr));
    CHECK_THROWS(SizeError, (void)rig.ring->try_submit(rig.unit(0, kSlot + 1)));
    CHECK_THROWS(StateError, rig.ring->acquire(12345, stream));
    CHECK_THROWS(StateError, rig.ring->release(~Ticket{0}, stream));
    CHECK_THROWS(StateError, (void)rig.ring->state(2));
    const Ticket ticket = *rig.ring->try_submit(rig.unit(0, 10));
    CHECK_THROWS(StateError, rig.ring->release(ticket, stream));
    rig.ring->acquire(ticket, stream);
    CHECK_THROWS(BusyError, rig.ring->cancel(ticket));
    CHECK_THROWS(BusyError, rig.ring->close());
    CHECK_THROWS(BusyError, rig.arena->close());
    rig.ring->release(ticket, stream);
    CHECK_THROWS(StateError, rig.ring->release(ticket, stream));
    rig.ring->close();
    rig.ring->close();
    CHECK_THROWS(StateError, (void)rig.ring->try_submit(rig.unit(0, 10)));
    CHECK_THROWS(StateError, (void)rig.ring->state(0));
    CHECK_THROWS(StateError, (void)rig.ring->export_slot(0));
}

TEST("a cancelled unit frees its slot for the next") {
    RingRig rig(delayed(), 1);
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    const Ticket ticket = *rig.ring->try_submit(rig.unit(0, 100));
    rig.ring->cancel(ticket);
    CHECK_THROWS(StateError, rig.ring->acquire(ticket, rig.compute.handle()));
    const Ticket next = *rig.ring->try_submit(rig.unit(100, 100));
    CHECK(rig.consume(next, 100)->take() == rig.file.part(100, 100));
    rig.check_clean();
}

TEST("a ring dropped with an acquired unit waits for all work") {
    RingRig rig;
    (void)rig.source->register_pages(0, 200'000, std::size_t{1} << 20);
    const Ticket ticket = *rig.ring->try_submit(rig.unit(0, 30'000));
    rig.ring->acquire(ticket, rig.compute.handle());
    const auto seen = rig.read(rig.ring->slot_address(0), 30'000, rig.compute.handle());
    rig.ring.reset();
    CHECK(seen->take() == rig.file.part(0, 30'000));
    rig.arena->close();
    rig.check_clean();
}
