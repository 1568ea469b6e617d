#include "native/extent_map.hpp"

#include <algorithm>
#include <iterator>

#include "native/error.hpp"

namespace exeunt::native {

void ExtentMap::give(std::size_t offset, std::size_t nbytes) {
    auto next = extents_.lower_bound(offset);
    const bool touches_next = next != extents_.end() && offset + nbytes > next->first;
    const bool touches_previous =
        next != extents_.begin() && std::prev(next)->first + std::prev(next)->second > offset;
    if (touches_next || touches_previous) {
        throw StateError("extent at offset " + std::to_string(offset) + " is free already");
    }
    free_bytes_ += nbytes;
    if (next != extents_.end() && next->first == offset + nbytes) {
        nbytes += next->second;
        next = extents_.erase(next);
    }
    if (next != extents_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            previous->second += nbytes;
            return;
        }
    }
    extents_.emplace_hint(next, offset, nbytes);
}

std::optional<std::size_t> ExtentMap::take(std::size_t nbytes, std::size_t alignment) {
    auto best = extents_.end();
    std::size_t best_offset = 0;
    for (auto extent = extents_.begin(); extent != extents_.end(); ++extent) {
        const auto [begin, size] = *extent;
        const std::size_t offset = (begin + alignment - 1) & ~(alignment - 1);
        const std::size_t skipped = offset - begin;
        if (skipped <= size && nbytes <= size - skipped &&
            (best == extents_.end() || size < best->second)) {
            best = extent;
            best_offset = offset;
        }
    }
    if (best == extents_.end()) {
        return std::nullopt;
    }
    carve(best, best_offset, nbytes);
    return best_offset;
}

bool ExtentMap::take_at(std::size_t offset, std::size_t nbytes) {
    auto extent = extents_.upper_bound(offset);
    if (extent == extents_.begin()) {
        return false;
    }
    --extent;
    const std::size_t skipped = offset - extent->first;
    if (skipped > extent->second || nbytes > extent->second - skipped) {
        return false;
    }
    carve(extent, offset, nbytes);
    return true;
}

void ExtentMap::carve(Extents::iterator extent, std::size_t offset, std::size_t nbytes) {
    const auto [begin, size] = *extent;
    const std::size_t before = offset - begin;
    const std::size_t after = size - before - nbytes;
    // The allocating insertion comes first, so that a failure leaves the map as it was.
    if (after > 0) {
        extents_.emplace(offset + nbytes, after);
    }
    if (before > 0) {
        extent->second = before;
    } else {
        extents_.erase(extent);
    }
    free_bytes_ -= nbytes;
}

std::size_t ExtentMap::largest_bytes() const noexcept {
    std::size_t largest = 0;
    for (const auto& [offset, size] : extents_) {
        largest = std::max(largest, size);
    }
    return largest;
}

}  // namespace exeunt::native
