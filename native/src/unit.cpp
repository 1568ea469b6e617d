#include "native/unit.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

Unit::Unit(std::vector<UnitItem> items) {
    if (items.empty()) {
        throw SizeError("a unit has 0 items; give at least 1");
    }
    for (const UnitItem& item : items) {
        check_within(item.file_offset, item.nbytes, item.source->file()->nbytes(),
                     "a unit's range of the weight file");
        target_nbytes_ = std::max(target_nbytes_,
                                  checked_add(item.target_offset, item.nbytes, "a unit's target"));
        nbytes_ = checked_add(nbytes_, item.nbytes, "a unit");
    }
    std::ranges::sort(items, {}, &UnitItem::target_offset);
    for (std::size_t index = 1; index < items.size(); ++index) {
        const UnitItem& before = items[index - 1];
        if (before.target_offset + before.nbytes > items[index].target_offset) {
            throw SizeError("two items of a unit overlap at target offset " +
                            std::to_string(items[index].target_offset) + " bytes; part them");
        }
    }
    std::ranges::sort(items, {}, [](const UnitItem& item) {
        return std::tuple(item.source.get(), item.file_offset);
    });
    for (UnitItem& item : items) {
        if (!items_.empty()) {
            UnitItem& last = items_.back();
            if (last.source == item.source && last.file_offset + last.nbytes == item.file_offset &&
                last.target_offset + last.nbytes == item.target_offset) {
                last.nbytes += item.nbytes;
                ++num_merged_;
                continue;
            }
        }
        items_.push_back(std::move(item));
    }
}

std::uint64_t Unit::sources_version() const noexcept {
    std::uint64_t version = 0;  // versions only grow, so their sum changes with any of them
    for (const UnitItem& item : items_) {
        version += item.source->version();
    }
    return version;
}

std::shared_ptr<const CopyPlan> Unit::plan(HostTier unpinned_tier) const {
    const std::lock_guard lock(mutex_);
    // Read before the pieces: a change in between makes the plan stale, never wrongly fresh.
    const std::uint64_t version = sources_version();
    if (plan_ != nullptr && planned_version_ == version && planned_tier_ == unpinned_tier) {
        return plan_;
    }
    auto plan = std::make_shared<CopyPlan>();
    plan->num_merged = num_merged_;
    for (const UnitItem& item : items_) {
        for (HostPiece& piece : item.source->pieces(item.file_offset, item.nbytes, unpinned_tier)) {
            Copy copy;
            copy.address = piece.address;
            copy.nbytes = piece.nbytes;
            copy.target_offset = item.target_offset + (piece.file_offset - item.file_offset);
            copy.file_offset = piece.file_offset;
            if (piece.tier == HostTier::kStaged) {
                copy.file = item.source->file();
                plan->staged.push_back(std::move(copy));
            } else {
                plan->pageable_bytes += piece.tier == HostTier::kPageable ? piece.nbytes : 0;
                plan->direct.push_back(std::move(copy));
            }
            plan->owners.push_back(std::move(piece.owner));
        }
    }
    plan_ = std::move(plan);
    planned_version_ = version;
    planned_tier_ = unpinned_tier;
    return plan_;
}

void enqueue_copies(const Device& device, std::span<const Copy> copies, cuda::DevicePtr base,
                    cuda::Stream stream) {
    const ContextScope scope(device);
    for (const Copy& copy : copies) {
        check(device.driver().copy_to_device(base + copy.target_offset, copy.address, copy.nbytes,
                                             stream),
              "cuMemcpyHtoDAsync");
    }
}

}  // namespace exeunt::native
