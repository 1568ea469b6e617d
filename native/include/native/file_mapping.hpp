#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "native/live.hpp"

namespace exeunt::native {

/// What tells a file from another one of the same name.
struct FileIdentity {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::uint64_t nbytes = 0;
    std::int64_t mtime_ns = 0;
    bool operator==(const FileIdentity&) const = default;
};

/// A regular file mapped read-only and shared, so that its page cache is the only copy.
class FileMapping {
  public:
    /// FileError when it cannot be opened or mapped, SizeError when it is empty.
    explicit FileMapping(std::string path);
    ~FileMapping();
    FileMapping(const FileMapping&) = delete;
    FileMapping& operator=(const FileMapping&) = delete;

    /// FileChanged unless both the path and the open file are still what was opened.
    void verify() const;
    /// The same of the open file alone, which costs a microsecond; `offset` is what was read.
    void verify_opened(std::size_t offset) const;
    /// Copies file bytes into `target`; FileChanged when the file has become too short.
    /// Blocks on the disk. `prefers_direct` bypasses the page cache where the file system and
    /// the alignment (4096 bytes, of all three) allow it.
    void read(std::size_t offset, std::byte* target, std::size_t nbytes, bool prefers_direct) const;

    /// True for the first caller only: a source must know of every pinned page of its mapping.
    [[nodiscard]] bool claim() const noexcept { return !is_claimed_.exchange(true); }

    [[nodiscard]] const std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t nbytes() const noexcept { return identity_.nbytes; }
    [[nodiscard]] const FileIdentity& identity() const noexcept { return identity_; }
    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    [[nodiscard]] bool has_direct_io() const noexcept { return direct_file_ >= 0; }

  private:
    const std::string path_;
    int file_ = -1;
    int direct_file_ = -1;  // a second descriptor without the page cache, or -1
    FileIdentity identity_;
    const std::byte* data_ = nullptr;
    mutable std::atomic<bool> is_claimed_{false};
    Live<ObjectKind::kFile> live_;
};

inline constexpr std::size_t kDirectAlignment = 4096;

}  // namespace exeunt::native
