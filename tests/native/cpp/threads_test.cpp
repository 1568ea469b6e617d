#include <atomic>
#include <thread>

#include "rig.hpp"

// Under ThreadSanitizer these tests look for data races; elsewhere for lost bytes and deadlocks.

using namespace exeunt::test;

namespace {

/// Runs the bodies at once and rethrows the first failure.
void run_together(std::vector<std::function<void()>> bodies) {
    std::vector<std::exception_ptr> failures(bodies.size());
    std::vector<std::thread> threads;
    for (std::size_t index = 0; index < bodies.size(); ++index) {
        threads.emplace_back([&, index] {
            try {
                bodies[index]();
            } catch (...) {
                failures[index] = std::current_exception();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (const std::exception_ptr& failure : failures) {
        if (failure) {
            std::rethrow_exception(failure);
        }
    }
}

}  // namespace

TEST("threads share an arena under pressure") {
    Rig rig(delayed(), 6 * kPage);
    std::vector<std::function<void()>> bodies;
    std::atomic<int> num_refused{0};
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        bodies.emplace_back([&rig, &num_refused, seed] {
            std::mt19937_64 random(seed);
            const Stream stream(rig.device);
            for (int step = 0; step < 60; ++step) {
                const auto range =
                    rig.arena->reserve(1 + random() % (3 * kPage), 256, DeviceUse::kWeights);
                range->set_demotion_order(static_cast<std::int64_t>(random() % 4));
                try {
                    range->commit();
                } catch (const OutOfMemory&) {
                    ++num_refused;
                    continue;
                }
                if (range->acquire()) {
                    const auto seen = rig.read(range->address(), 1, stream.handle());
                    range->release(stream.handle());
                }
                (void)rig.arena->collect();
            }
        });
    }
    bodies.emplace_back([&rig] {
        for (int step = 0; step < 2000; ++step) {
            rig.driver->advance();
        }
    });
    run_together(std::move(bodies));
    rig.check_clean();
    rig.arena->close();
}

TEST("threads share a ring with staged, registered and pageable bytes") {
    Rig rig(delayed());
    const WeightFile file(200'000);
    const auto source = rig.open(file.path);
    const auto staging = std::make_shared<StagingRing>(rig.device, rig.host_budget,
                                                       StagingOptions{3, 8192, 2, false});
    const Stream copies(rig.device);
    const auto ring = std::make_shared<TransferRing>(rig.arena, RingOptions{4, 30'000, 4},
                                                     copies.handle(), staging);
    std::vector<std::function<void()>> bodies;
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
        bodies.emplace_back([&, seed] {
            std::mt19937_64 random(seed);
            const Stream compute(rig.device);
            for (int step = 0; step < 40; ++step) {
                const std::size_t offset = random() % 170'000;
                const auto unit = std::make_shared<const Unit>(
                    std::vector<UnitItem>{{source, offset, 30'000, 0}});
                std::optional<Ticket> ticket;
                while (!(ticket = ring->try_submit(unit))) {
                    std::this_thread::yield();
                }
                try {
                    ring->acquire(*ticket, compute.handle());
                } catch (const StateError&) {
                    continue;  // another thread's unit took the slot before it was acquired
                }
                const auto seen =
                    rig.read(ring->slot_address(ring->slot_of(*ticket)), 30'000, compute.handle());
                ring->release(*ticket, compute.handle());
                CHECK(seen->take() == file.part(offset, 30'000));
            }
        });
    }
    bodies.emplace_back([&] {
        for (int step = 0; step < 30; ++step) {
            (void)source->register_pages(static_cast<std::size_t>(step) * 4096, 40'000, 8192);
            (void)ring->stats();
            if (step % 5 == 4) {
                source->release();
            }
        }
    });
    run_together(std::move(bodies));
    rig.check_clean();
    ring->close();
}
