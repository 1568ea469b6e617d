#include <array>
#include <map>

#include "rig.hpp"

// Random programs against a model: what a consumer sees must be what the program put there,
// whatever the order in which the device works, whatever is demoted, and whichever call fails.

using namespace exeunt::test;

namespace {

constexpr std::size_t kFile = 300'000;
constexpr std::size_t kSlot = 20'000;
constexpr std::size_t kLimit = 12 * kPage;

class Program {
  public:
    Program(std::uint64_t seed, const WeightFile& file)
        : random_(seed), file_(file), rig_(delayed(seed), kLimit) {
        source_ = rig_.open(file.path);
        copies_ = std::make_unique<Stream>(rig_.device);
        compute_ = std::make_unique<Stream>(rig_.device);
        ring_ = std::make_shared<TransferRing>(rig_.arena, RingOptions{1 + draw(3), kSlot, draw(4)},
                                               copies_->handle(), nullptr);
        order_ = std::make_unique<EventFence>(rig_.device);
    }

    void run(std::size_t num_steps) {
        if (draw(2) == 0) {
            rig_.driver->inject_fault(
                1 + draw(200), draw(2) == 0 ? cuda::Status::kUnknown : cuda::Status::kOutOfMemory);
        }
        for (std::size_t step = 0; step < num_steps; ++step) {
            try {
                one_step();
            } catch (const CudaError& error) {
                if (!rig_.driver->fault_was_delivered()) {
                    throw Failure(error.what());
                }
            } catch (const OutOfMemory&) {
                ++num_out_of_memory;
            }
            check_model();
        }
        finish();
    }

    std::size_t num_out_of_memory = 0;

  private:
    struct Resident {
        std::shared_ptr<Range> range;
        std::optional<std::size_t> file_offset;  // of its contents, when known
        std::vector<dlpack::ManagedTensor*> views;
    };
    struct Expected {
        std::unique_ptr<Readback> readback;
        std::string bytes;
    };

    std::size_t draw(std::size_t bound) { return random_() % bound; }

    std::shared_ptr<const Unit> draw_unit(std::size_t offset, std::size_t nbytes) {
        const std::size_t cut = 1 + draw(nbytes - 1);
        return std::make_shared<const Unit>(std::vector<UnitItem>{
            {source_, offset + cut, nbytes - cut, cut}, {source_, offset, cut, 0}});
    }

    void one_step() {
        if (residents_.empty()) {
            reserve();
            return;
        }
        Resident& resident = residents_[draw(residents_.size())];
        switch (draw(16)) {
            case 0:
                if (residents_.size() < 10) {
                    reserve();
                }
                break;
            case 1:
            case 2:
                commit(resident);
                break;
            case 3:
                upload_some(resident);
                break;
            case 4:
            case 5:
                read_resident(resident);
                break;
            case 6:
                resident.range->demote();
                break;
            case 7:
                drop(resident);
                break;
            case 8:
                if (resident.range->state() == RangeState::kCommitted) {
                    resident.views.push_back(
                        export_view(resident.range, 0, 1 + draw(resident.range->nbytes()),
                                    draw(2) == 0 ? Hold::kPages : Hold::kAddress));
                }
                break;
            case 9:
                if (!resident.views.empty()) {
                    resident.views.back()->deleter(resident.views.back());
                    resident.views.pop_back();
                }
                break;
            case 10:
                for (std::size_t count = draw(12); count > 0; --count) {
                    rig_.driver->advance();
                }
                break;
            case 11:
                (void)rig_.arena->collect();
                break;
            case 12:
                change_tier();
                break;
            case 13:
            case 14:
                stream_unit();
                break;
            default:
                resident.range->set_demotion_order(
                    draw(3) == 0 ? std::nullopt : std::optional<std::int64_t>(draw(5)));
        }
    }

    void reserve() {
        const std::size_t nbytes = draw(2) == 0 ? 2 + draw(2000) : 2 + draw(4 * kPage);
        Resident resident;
        resident.range =
            rig_.arena->reserve(nbytes, std::size_t{256} << draw(4), DeviceUse::kWeights);
        residents_.push_back(std::move(resident));
    }

    void commit(Resident& resident) {
        const bool keeps_contents = resident.range->state() != RangeState::kReserved;
        if (!keeps_contents) {
            resident.file_offset.reset();
        }
        resident.range->commit();
    }

    void upload_some(Resident& resident) {
        if (resident.range->state() != RangeState::kCommitted) {
            return;
        }
        // Earlier readers first: this upload is the caller's to order, as a residency policy does.
        order_->record(compute_->handle());
        order_->block_stream(copies_->handle());
        resident.file_offset.reset();
        const std::size_t offset = draw(kFile - resident.range->nbytes());
        const auto done = upload(resident.range, draw_unit(offset, resident.range->nbytes()),
                                 copies_->handle(), nullptr);
        done->block_stream(compute_->handle());
        resident.file_offset = offset;
    }

    void read_resident(Resident& resident) {
        if (!resident.range->acquire()) {
            return;
        }
        std::exception_ptr failure;
        try {
            if (resident.file_offset) {
                expect(resident.range->address(), resident.range->nbytes(), *resident.file_offset);
            }
        } catch (const Error&) {
            failure = std::current_exception();
        }
        again_if_it_fails([&] { resident.range->release(compute_->handle()); });
        if (failure) {
            std::rethrow_exception(failure);
        }
    }

    void stream_unit() {
        const std::size_t nbytes = 2 + draw(kSlot - 2);
        const std::size_t offset = draw(kFile - nbytes);
        const auto ticket = ring_->try_submit(draw_unit(offset, nbytes));
        CHECK(ticket.has_value());
        if (draw(8) == 0) {
            ring_->cancel(*ticket);
            return;
        }
        again_if_it_fails([&] { ring_->acquire(*ticket, compute_->handle()); });
        std::exception_ptr failure;
        try {
            expect(ring_->slot_address(ring_->slot_of(*ticket)), nbytes, offset);
        } catch (const Error&) {
            failure = std::current_exception();
        }
        again_if_it_fails([&] { ring_->release(*ticket, compute_->handle()); });
        if (failure) {
            std::rethrow_exception(failure);
        }
    }

    void change_tier() {
        switch (draw(3)) {
            case 0:
                (void)source_->register_pages(draw(kFile / 2), kFile / 2, 20'480);
                break;
            case 1:
                source_->release();
                break;
            default:
                try {
                    (void)source_->load_slab(draw(kFile / 2), 1 + draw(5000));
                } catch (const StateError&) {
                    // Part of it is pinned already: an answer as good as any.
                }
        }
    }

    void expect(cuda::DevicePtr address, std::size_t nbytes, std::size_t file_offset) {
        if (expected_.size() > 6) {
            settle(draw(expected_.size()));
        }
        Expected expected;
        expected.bytes = file_.part(file_offset, nbytes);
        expected.readback = rig_.read(address, nbytes, compute_->handle());
        expected_.push_back(std::move(expected));
    }

    void settle(std::size_t index) {
        std::string bytes;
        again_if_it_fails([&] { bytes = expected_[index].readback->take(); });
        CHECK(bytes == expected_[index].bytes);
        expected_.erase(expected_.begin() + static_cast<std::ptrdiff_t>(index));
    }

    template <typename Action>
    static void again_if_it_fails(Action action) {
        try {
            action();
        } catch (const CudaError&) {
            action();
        }
    }

    void drop(Resident& resident) {
        for (dlpack::ManagedTensor* view : resident.views) {
            view->deleter(view);
        }
        residents_.erase(residents_.begin() + (&resident - residents_.data()));
    }

    void check_model() const {
        const ArenaStats stats = rig_.arena->stats();
        CHECK(stats.budget.used_bytes <= kLimit);  // invariant 1
        CHECK(stats.budget.peak_bytes <= kLimit);
        std::map<cuda::DevicePtr, std::size_t> extents;
        for (const Resident& resident : residents_) {
            extents[resident.range->address()] = resident.range->nbytes();
        }
        CHECK_EQUAL(extents.size(), residents_.size());
        cuda::DevicePtr end = 0;
        for (const auto& [address, nbytes] : extents) {
            CHECK(address >= end);
            end = address + nbytes;
        }
        rig_.check_clean();
    }

    void finish() {
        rig_.driver->inject_fault(0, cuda::Status::kSuccess);
        while (!expected_.empty()) {
            settle(draw(expected_.size()));
        }
        while (!residents_.empty()) {
            drop(residents_.back());
        }
        ring_->close();
        rig_.arena->close();
        ring_.reset();
        source_.reset();
        CHECK_EQUAL(rig_.arena->stats().budget.used_bytes, 0U);
        CHECK_EQUAL(rig_.host_budget->snapshot().used_bytes, 0U);
        rig_.check_clean();
        for (const auto& [name, count] : rig_.driver->driver_objects()) {
            if (name != "contexts" && name != "streams" && name != "events") {
                CHECK_EQUAL(count, 0U);
            }
        }
    }

    std::mt19937_64 random_;
    const WeightFile& file_;
    Rig rig_;
    std::shared_ptr<HostSource> source_;
    std::unique_ptr<Stream> copies_;
    std::unique_ptr<Stream> compute_;
    std::shared_ptr<TransferRing> ring_;
    std::unique_ptr<EventFence> order_;
    std::vector<Resident> residents_;
    std::vector<Expected> expected_;
};

}  // namespace

TEST("random programs see their own bytes and leave nothing behind") {
    const WeightFile file(kFile);
    std::size_t num_out_of_memory = 0;
    for (std::uint64_t seed = 1; seed <= num_programs; ++seed) {
        try {
            Program program(seed, file);
            program.run(60);
            num_out_of_memory += program.num_out_of_memory;
        } catch (const std::exception& error) {
            throw Failure("program " + std::to_string(seed) + ": " + error.what());
        }
    }
    CHECK(num_programs < 100 || num_out_of_memory > 0);
}
