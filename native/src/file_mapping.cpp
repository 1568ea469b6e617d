#include "native/file_mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

namespace {

FileIdentity identity_of(const struct stat& status) {
    constexpr std::int64_t kNsPerSecond = 1'000'000'000;
    return {status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
            status.st_mtim.tv_sec * kNsPerSecond + status.st_mtim.tv_nsec};
}

bool is_direct_aligned(std::size_t offset, const std::byte* target, std::size_t nbytes) {
    return (offset | reinterpret_cast<std::uintptr_t>(target) | nbytes) % kDirectAlignment == 0;
}

}  // namespace

FileMapping::FileMapping(std::string path) : path_(std::move(path)) {
    file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file_ < 0) {
        throw FileError("weight file cannot be opened: " + path_, errno);
    }
    try {
        struct stat status{};
        if (fstat(file_, &status) != 0) {
            throw FileError("weight file has no status: " + path_, errno);
        }
        if (!S_ISREG(status.st_mode) || status.st_size == 0) {
            throw SizeError("weight file is no regular file or has 0 bytes: " + path_ +
                            "; download it again");
        }
        identity_ = identity_of(status);
        void* mapped = mmap(nullptr, nbytes(), PROT_READ, MAP_SHARED, file_, 0);
        if (mapped == MAP_FAILED) {
            throw FileError("weight file cannot be mapped: " + path_, errno);
        }
        data_ = static_cast<const std::byte*>(mapped);
    } catch (...) {
        close(file_);
        throw;
    }
    direct_file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    struct stat status{};
    if (direct_file_ >= 0 &&
        (fstat(direct_file_, &status) != 0 || identity_of(status) != identity_)) {
        close(direct_file_);  // the name was moved to another file in between
        direct_file_ = -1;
    }
}

FileMapping::~FileMapping() {
    munmap(const_cast<std::byte*>(data_), nbytes());
    close(file_);
    if (direct_file_ >= 0) {
        close(direct_file_);
    }
}

void FileMapping::verify() const {
    struct stat opened{};
    struct stat named{};
    if (fstat(file_, &opened) != 0 || stat(path_.c_str(), &named) != 0) {
        throw FileChanged("weight file has gone: " + path_ + "; load it again");
    }
    if (identity_of(opened) != identity_ || identity_of(named) != identity_) {
        throw FileChanged("weight file changed since it was opened with " +
                          std::to_string(identity_.nbytes) + " bytes, now " +
                          std::to_string(named.st_size) + " bytes: " + path_ + "; load it again");
    }
}

void FileMapping::verify_opened(std::size_t offset) const {
    struct stat opened{};
    if (fstat(file_, &opened) != 0 || identity_of(opened) != identity_) {
        throw FileChanged("weight file changed before byte " + std::to_string(offset) +
                          " of it was read, it had " + std::to_string(identity_.nbytes) +
                          " bytes and has " + std::to_string(opened.st_size) + ": " + path_ +
                          "; load it again");
    }
}

void FileMapping::read(std::size_t offset, std::byte* target, std::size_t nbytes,
                       bool prefers_direct) const {
    while (nbytes > 0) {
        const bool is_direct =
            prefers_direct && has_direct_io() && is_direct_aligned(offset, target, nbytes);
        const ssize_t count =
            pread(is_direct ? direct_file_ : file_, target, nbytes, static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0 && is_direct) {
            prefers_direct = false;  // some file systems open with O_DIRECT but refuse to read
            continue;
        }
        if (count < 0) {
            throw FileError(
                "weight file cannot be read at byte " + std::to_string(offset) + ": " + path_,
                errno);
        }
        if (count == 0) {
            throw FileChanged("weight file ends at byte " + std::to_string(offset) + ", " +
                              std::to_string(nbytes) + " bytes too early, it had " +
                              std::to_string(identity_.nbytes) + " bytes: " + path_ +
                              "; load it again");
        }
        offset += static_cast<std::size_t>(count);
        target += count;
        nbytes -= static_cast<std::size_t>(count);
    }
}

}  // namespace exeunt::native
