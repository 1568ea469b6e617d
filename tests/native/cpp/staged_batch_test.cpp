#include "native/staged_batch.hpp"

#include <unistd.h>

#include <exception>
#include <thread>

#include "rig.hpp"

using namespace exeunt::test;

namespace {

/// A file, a staging ring and a place on the device for each of a few threads.
struct Stage {
    explicit Stage(const FakeOptions& options)
        : rig(options),
          file(200'000),
          mapping(std::make_shared<FileMapping>(file.path)),
          staging(std::make_shared<StagingRing>(rig.device, rig.host_budget,
                                                StagingOptions{3, 8192, 2, false})),
          copies(rig.device) {}

    /// Half of the bytes out of the file, the others out of pageable memory.
    std::shared_ptr<StagedBatch> batch(std::size_t offset, cuda::DevicePtr target) const {
        const auto* memory = reinterpret_cast<const std::byte*>(file.bytes.data());
        return std::make_shared<StagedBatch>(
            staging, std::vector<CopyBatch::Part>{},
            std::vector<StagedBatch::Part>{
                {mapping, offset, nullptr, 20'000, target},
                {nullptr, 0, memory + offset + 20'000, 20'000, target + 20'000}});
    }

    Rig rig;
    WeightFile file;
    std::shared_ptr<FileMapping> mapping;
    std::shared_ptr<StagingRing> staging;
    Stream copies;
};

void fill_and_check(Stage& stage, std::uint64_t seed, int num_steps) {
    std::mt19937_64 random(seed);
    const Stream compute(stage.rig.device);
    const auto range = stage.rig.arena->reserve(kPage, 256, DeviceUse::kRing);
    range->commit();
    const auto ready = std::make_shared<EventFence>(stage.rig.device);
    const auto used = std::make_shared<EventFence>(stage.rig.device);
    for (int step = 0; step < num_steps; ++step) {
        const std::size_t offset = random() % 150'000;
        // The batch goes before its transfer ends: the transfer keeps what it needs.
        const auto transfer =
            stage.batch(offset, range->address())->submit(stage.copies.handle(), {used}, ready);
        CHECK(transfer->wait() == nullptr);
        ready->block_stream(compute.handle());
        const auto seen = stage.rig.read(range->address(), 40'000, compute.handle());
        used->record(compute.handle());
        CHECK(seen->take() == stage.file.part(offset, 40'000));
    }
    ready->synchronize();
    used->synchronize();
}

}  // namespace

TEST("staged batches arrive whole, behind the readers of what they overwrite") {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
        Stage stage(delayed(seed));
        fill_and_check(stage, seed, 10);
        stage.rig.check_clean();
    }
}

TEST("threads submit staged batches through one ring") {
    Stage stage(delayed(3));
    std::vector<std::exception_ptr> failures(3);
    std::vector<std::thread> threads;
    for (std::uint64_t seed = 0; seed < failures.size(); ++seed) {
        threads.emplace_back([&stage, &failures, seed] {
            try {
                fill_and_check(stage, seed, 20);
            } catch (...) {
                failures[seed] = std::current_exception();
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
    stage.rig.check_clean();
}

TEST("a transfer that is still on its way says so, and one of a cut file says where") {
    Stage stage({});
    const auto range = stage.rig.arena->reserve(kPage, 256, DeviceUse::kRing);
    range->commit();
    CHECK(truncate(stage.file.path.c_str(), 10'000) == 0);
    const auto ready = std::make_shared<EventFence>(stage.rig.device);
    // One buffer holds it: of several, whichever thread fails first is heard.
    const StagedBatch batch(stage.staging, {},
                            {{stage.mapping, 5'000, nullptr, 6'000, range->address()}});
    const auto transfer = batch.submit(stage.copies.handle(), {}, ready);
    std::optional<std::exception_ptr> failure;
    while (!(failure = transfer->wait_for(0.001))) {
    }
    CHECK(transfer->is_complete());
    bool is_named = false;
    try {
        std::rethrow_exception(*failure);
    } catch (const FileChanged& error) {
        is_named = std::string(error.what()).find("ends at byte 10000") != std::string::npos;
    }
    CHECK(is_named);
    ready->synchronize();
    stage.rig.check_clean();
}

TEST("hostile staged batches are refused") {
    Stage stage({});
    using Direct = std::vector<CopyBatch::Part>;
    using Staged = std::vector<StagedBatch::Part>;
    const std::byte byte{};
    const std::size_t huge = ~std::size_t{0};
    const auto make = [&](const Direct& direct, const Staged& staged) {
        return StagedBatch(stage.staging, direct, staged);
    };
    const StagedBatch::Part fine{stage.mapping, 0, nullptr, 1, 1};
    CHECK_THROWS(SizeError, make({}, {}));
    CHECK_THROWS(SizeError, make({{&byte, 0, 1}}, {fine}));
    CHECK_THROWS(SizeError, make({}, {{nullptr, 0, nullptr, 1, 1}}));
    CHECK_THROWS(SizeError, make({}, {{nullptr, 0, &byte, 1, 0}}));
    CHECK_THROWS(SizeError, make({}, {{nullptr, 0, &byte, 2, huge}}));
    CHECK_THROWS(SizeError, make({}, {{stage.mapping, 200'000, nullptr, 1, 1}}));
    CHECK_THROWS(SizeError, make({}, {{stage.mapping, huge, nullptr, 1, 1}}));
    CHECK_EQUAL(make({{&byte, 1, 1}}, {fine}).nbytes(), std::size_t{2});
}
