#include "native/host_source.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

HostSource::HostSource(std::shared_ptr<Device> device, std::shared_ptr<Budget> host_budget,
                       std::shared_ptr<const FileMapping> file)
    : device_(std::move(device)), host_budget_(std::move(host_budget)), file_(std::move(file)) {
    if (!file_->claim()) {
        throw StateError("a file mapping serves one source: " + file_->path() + "; map it again");
    }
}

HostSource::Segments HostSource::pinned_segments() const {
    Segments pinned = segments_;
    for (const Lingering& released : lingering_) {
        // Only bytes that are pinned right now: a copy that read some of them as pageable would
        // straddle a registration, which the driver refuses.
        if (auto owner = released.owner.lock()) {
            pinned[released.offset] = {released.tier, released.nbytes, released.address,
                                       std::move(owner)};
        }
    }
    return pinned;
}

std::pair<std::size_t, std::size_t> HostSource::next_gap(const Segments& segments,
                                                         std::size_t offset, std::size_t end) {
    while (offset < end) {
        auto next = segments.upper_bound(offset);
        if (next != segments.begin()) {
            const auto& [begin, segment] = *std::prev(next);
            if (offset < begin + segment.nbytes) {
                offset = begin + segment.nbytes;
                continue;
            }
        }
        return {offset, next == segments.end() ? end : std::min(end, next->first)};
    }
    return {end, end};
}

TierResult HostSource::register_pages(std::size_t offset, std::size_t nbytes,
                                      std::size_t window_bytes) {
    device_->refuse_after_fork();
    check_within(offset, nbytes, file_->nbytes(), "a range of the weight file");
    const std::size_t page = host_page_bytes();
    if (window_bytes < page) {
        throw SizeError("a registration window of " + std::to_string(window_bytes) +
                        " bytes is below one host page of " + std::to_string(page) +
                        " bytes; raise it");
    }
    file_->verify();
    TierResult result;
    result.requested_bytes = nbytes;
    if (!device_->capabilities().has_read_only_registration) {
        result.outcome = TierOutcome::kUnsupported;
        return result;
    }
    const std::size_t end = offset + nbytes;
    const std::lock_guard lock(mutex_);
    Segments pinned = pinned_segments();
    std::size_t position = offset;
    while (result.outcome == TierOutcome::kComplete) {
        const auto [gap_begin, gap_end] = next_gap(pinned, position, end);
        if (gap_begin >= end) {
            break;
        }
        // Whole pages, but none that a neighbouring segment holds already: the driver refuses
        // a page twice. What is left out of such a page stays with the next tier.
        std::size_t begin = align_down(gap_begin, page);
        if (begin < gap_begin &&
            next_gap(pinned, begin, gap_begin) != std::pair(begin, gap_begin)) {
            begin = align_up(gap_begin, page, "a registration window");
        }
        std::size_t stop =
            std::min(begin + align_down(window_bytes, page),
                     std::min(align_up(gap_end, page, "a registration window"), file_->nbytes()));
        if (stop > gap_end && next_gap(pinned, gap_end, stop) != std::pair(gap_end, stop)) {
            stop = align_down(gap_end, page);
        }
        position = std::max(stop, gap_end);
        if (begin >= stop) {
            continue;
        }
        position = stop;
        auto charge = host_budget_->try_charge(HostUse::kRegistered,
                                               align_up(stop - begin, page, "a window"));
        if (!charge) {
            result.outcome = TierOutcome::kLimit;
            break;
        }
        try {
            auto owner = std::make_shared<const HostRegistration>(device_, file_, begin,
                                                                  stop - begin, std::move(*charge));
            segments_[begin] = {HostTier::kRegistered, stop - begin, file_->data() + begin,
                                std::move(owner)};
            pinned[begin] = segments_[begin];
        } catch (const CudaError& error) {
            result.outcome = TierOutcome::kRefused;
            result.status = error.status;
        }
    }
    version_.fetch_add(1);
    for (const auto& [begin, segment] : pinned) {
        const std::size_t from = std::max(begin, offset);
        const std::size_t to = std::min(begin + segment.nbytes, end);
        result.held_bytes += segment.tier == HostTier::kRegistered && from < to ? to - from : 0;
    }
    return result;
}

TierResult HostSource::load_slab(std::size_t offset, std::size_t nbytes) {
    device_->refuse_after_fork();
    check_within(offset, nbytes, file_->nbytes(), "a range of the weight file");
    file_->verify();
    TierResult result;
    result.requested_bytes = nbytes;
    auto charge = host_budget_->try_charge(HostUse::kSlab, nbytes);
    if (!charge) {
        result.outcome = TierOutcome::kLimit;
        return result;
    }
    std::shared_ptr<PinnedBuffer> slab;
    try {
        slab = std::make_shared<PinnedBuffer>(device_, std::move(*charge));
    } catch (const CudaError& error) {
        result.outcome = TierOutcome::kRefused;
        result.status = error.status;
        return result;
    }
    file_->read(offset, slab->data(), nbytes, /*prefers_direct=*/false);
    const std::lock_guard lock(mutex_);
    if (next_gap(pinned_segments(), offset, offset + nbytes) !=
        std::pair(offset, offset + nbytes)) {
        throw StateError(
            "bytes " + std::to_string(offset) + " to " + std::to_string(offset + nbytes) +
            " are pinned in part already: " + file_->path() + "; release the source first");
    }
    const std::byte* address = slab->data();
    segments_[offset] = {HostTier::kSlab, nbytes, address, std::move(slab)};
    version_.fetch_add(1);
    result.held_bytes = nbytes;
    return result;
}

void HostSource::release() {
    Segments released;  // ends after the lock does: giving pages back takes its time
    const std::lock_guard lock(mutex_);
    std::erase_if(lingering_, [](const Lingering& old) { return old.owner.expired(); });
    for (const auto& [offset, segment] : segments_) {
        lingering_.push_back(
            {offset, segment.tier, segment.nbytes, segment.address, segment.owner});
    }
    released.swap(segments_);
    version_.fetch_add(1);
}

std::vector<HostPiece> HostSource::pieces(std::size_t offset, std::size_t nbytes,
                                          HostTier unpinned_tier) const {
    check_within(offset, nbytes, file_->nbytes(), "a range of the weight file");
    std::vector<HostPiece> found;
    const std::size_t end = offset + nbytes;
    const std::lock_guard lock(mutex_);
    const Segments pinned = pinned_segments();
    while (offset < end) {
        const auto [gap_begin, gap_end] = next_gap(pinned, offset, end);
        while (offset < gap_begin) {
            const auto segment = std::prev(pinned.upper_bound(offset));
            const std::size_t stop = std::min(end, segment->first + segment->second.nbytes);
            found.push_back({segment->second.tier, offset, stop - offset,
                             segment->second.address + (offset - segment->first),
                             segment->second.owner});
            offset = stop;
        }
        if (gap_begin < gap_end) {
            found.push_back(
                {unpinned_tier, gap_begin, gap_end - gap_begin, file_->data() + gap_begin, file_});
            offset = gap_end;
        }
    }
    return found;
}

std::size_t HostSource::count_bytes(const Segments& segments, HostTier tier) {
    std::size_t nbytes = 0;
    for (const auto& [begin, segment] : segments) {
        nbytes += segment.tier == tier ? segment.nbytes : 0;
    }
    return nbytes;
}

std::size_t HostSource::registered_bytes() const {
    const std::lock_guard lock(mutex_);
    return count_bytes(segments_, HostTier::kRegistered);
}

std::size_t HostSource::slab_bytes() const {
    const std::lock_guard lock(mutex_);
    return count_bytes(segments_, HostTier::kSlab);
}

}  // namespace exeunt::native
