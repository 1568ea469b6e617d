#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace exeunt::native {

/// Free extents of a numbered space: what is neither taken nor yet given. Not thread-safe.
class ExtentMap {
  public:
    /// Adds `[offset, offset + nbytes)`, joined with its neighbours. StateError when part of it is
    /// free already: somebody gave it twice.
    void give(std::size_t offset, std::size_t nbytes);
    /// Smallest free extent that holds `nbytes` at a multiple of `alignment`, if there is one.
    [[nodiscard]] std::optional<std::size_t> take(std::size_t nbytes, std::size_t alignment);
    /// Takes exactly this extent; false when part of it is not free.
    [[nodiscard]] bool take_at(std::size_t offset, std::size_t nbytes);

    [[nodiscard]] std::size_t free_bytes() const noexcept { return free_bytes_; }
    [[nodiscard]] std::size_t largest_bytes() const noexcept;

  private:
    using Extents = std::map<std::size_t, std::size_t>;
    void carve(Extents::iterator extent, std::size_t offset, std::size_t nbytes);

    Extents extents_;  // offset -> size
    std::size_t free_bytes_ = 0;
};

}  // namespace exeunt::native
