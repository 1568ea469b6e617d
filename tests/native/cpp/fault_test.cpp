#include "native/torch_route.hpp"
#include "rig.hpp"

// The n-th driver call of a run fails, for every n. Each step must fail with a typed error and
// leave everything as it was, so that the same step done again succeeds (invariants 6 and 10).

using namespace exeunt::test;

namespace {

constexpr std::size_t kNbytes = 150'000;
constexpr std::size_t kSlot = 40'000;

int num_failures = 0;

template <typename Step>
void attempt(Step step) {
    try {
        step();
    } catch (const Error&) {
        ++num_failures;
        step();
    }
}

void scripted_run(const std::shared_ptr<FakeDriver>& driver, const WeightFile& file) {
    std::shared_ptr<Device> device;
    std::shared_ptr<Arena> arena;
    attempt([&] { device = std::make_shared<Device>(driver, 0); });
    attempt([&] { arena = std::make_shared<Arena>(device, ArenaOptions{64 * kPage, 0}); });
    const auto host_budget = std::make_shared<Budget>(std::size_t{64} << 20);
    const auto source =
        std::make_shared<HostSource>(device, host_budget, std::make_shared<FileMapping>(file.path));
    attempt([&] {
        if (source->register_pages(0, 60'000, 16'384).outcome == TierOutcome::kRefused) {
            throw StateError("a refusal is a result; the test counts it with the errors");
        }
    });
    attempt([&] {
        if (source->load_slab(70'000, 10'000).outcome == TierOutcome::kRefused) {
            throw StateError("likewise");
        }
    });
    std::unique_ptr<Stream> copies;
    std::unique_ptr<Stream> compute;
    attempt([&] { copies = std::make_unique<Stream>(device); });
    attempt([&] { compute = std::make_unique<Stream>(device); });

    std::shared_ptr<Range> small;
    std::shared_ptr<Range> large;
    attempt([&] { small = arena->reserve(100, 256, DeviceUse::kWeights); });
    attempt([&] { large = arena->reserve(kNbytes, 256, DeviceUse::kWeights); });
    attempt([&] { small->commit(); });
    attempt([&] { large->commit(); });
    const auto whole = std::make_shared<const Unit>(std::vector<UnitItem>{{source, 0, kNbytes, 0}});
    attempt([&] { (void)upload(large, whole, copies->handle(), nullptr); });

    std::shared_ptr<TransferRing> ring;
    attempt([&] {
        ring = std::make_shared<TransferRing>(arena, RingOptions{2, kSlot, 2}, copies->handle(),
                                              nullptr);
    });
    for (std::size_t step = 0; step < 3; ++step) {
        const std::size_t offset = 50'000 + step * 7000;
        const auto unit =
            std::make_shared<const Unit>(std::vector<UnitItem>{{source, offset, 30'000, 0}});
        std::optional<Ticket> ticket;
        std::unique_ptr<Readback> seen;
        attempt([&] { ticket = ring->try_submit(unit); });
        CHECK(ticket.has_value());
        attempt([&] { ring->acquire(*ticket, compute->handle()); });
        attempt([&] { seen = std::make_unique<Readback>(device, host_budget, 30'000); });
        attempt([&] {
            seen->enqueue(ring->slot_address(ring->slot_of(*ticket)), 30'000, compute->handle());
        });
        attempt([&] { ring->release(*ticket, compute->handle()); });
        std::string bytes;
        attempt([&] { bytes = seen->take(); });
        CHECK(bytes == file.part(offset, 30'000));
    }
    CHECK(large->acquire());
    attempt([&] { large->release(compute->handle()); });
    attempt([&] { large->demote(); });
    attempt([&] { (void)arena->collect(); });
    attempt([&] { large->commit(); });
    attempt([&] { small->retire(); });
    attempt([&] { (void)device->memory_info(); });
    attempt([&] { (void)ring->stats(); });
    attempt([&] { ring->close(); });
    attempt([&] { arena->close(); });
}

}  // namespace

TEST("invariants 6 and 10: any one driver call may fail") {
    const WeightFile file(200'000);
    std::uint64_t nth = 0;
    int num_seen = 0;
    for (bool was_delivered = true; was_delivered;) {
        ++nth;
        num_failures = 0;
        const auto driver = std::make_shared<FakeDriver>(delayed(nth));
        driver->inject_fault(nth,
                             nth % 2 == 0 ? cuda::Status::kUnknown : cuda::Status::kInvalidValue);
        scripted_run(driver, file);
        was_delivered = driver->fault_was_delivered();
        // A failed release is tried again, so it may pass unseen; never does one fault become two.
        CHECK(num_failures <= 1);
        num_seen += num_failures;
        for (const std::string& violation : driver->violations()) {
            throw Failure("call " + std::to_string(nth) + ": " + violation);
        }
        for (const auto& [name, count] : driver->driver_objects()) {
            if (count != 0) {
                throw Failure("call " + std::to_string(nth) + " left " + name);
            }
        }
    }
    CHECK(nth > 100);
    CHECK(num_seen > 60);
}

TEST("a driver that runs out of memory once is asked again after giving back") {
    Rig rig;
    const auto resident = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    resident->commit();
    resident->set_demotion_order(0);
    const auto wanted = rig.arena->reserve(kPage, 256, DeviceUse::kWeights);
    // cuCtxGetCurrent, cuCtxPushCurrent, then cuMemCreate
    rig.driver->inject_fault(3, cuda::Status::kOutOfMemory);
    wanted->commit();
    CHECK(rig.driver->fault_was_delivered());
    CHECK(resident->state() == RangeState::kReserved);
}
