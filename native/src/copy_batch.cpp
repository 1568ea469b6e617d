#include "native/copy_batch.hpp"

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

#include "native/error.hpp"
#include "native/host_memory.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

namespace {

/// Whether a page of the range belongs to a file that is mapped privately.
bool touches_private_file(std::uint64_t address, std::size_t nbytes) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        std::uint64_t begin = 0;
        std::uint64_t end = 0;
        std::uint64_t inode = 0;
        char permissions[5] = {};
        if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %" SCNu64, &begin, &end,
                        permissions, &inode) == 4 &&
            begin < address + nbytes && address < end && permissions[3] == 'p' && inode != 0) {
            return true;
        }
    }
    return false;
}

}  // namespace

HostPages::HostPages(std::shared_ptr<Device> device, void* address, std::size_t nbytes,
                     bool is_read_only)
    : device_(std::move(device)), address_(address) {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    if (address == nullptr || nbytes == 0 || (begin | nbytes) % host_page_bytes() != 0) {
        throw SizeError("host pages at " + std::to_string(begin) + " of " + std::to_string(nbytes) +
                        " bytes are no whole pages of " + std::to_string(host_page_bytes()) +
                        " bytes; round outwards");
    }
    (void)checked_add(begin, nbytes, "the end of host pages");
    if (touches_private_file(begin, nbytes)) {
        check(cuda::Status::kNotSupported, "registering a private file mapping");
    }
    const ContextScope scope(*device_);
    const unsigned flags =
        cuda::kHostRegisterPortable | (is_read_only ? cuda::kHostRegisterReadOnly : 0);
    check(device_->driver().host_register(address_, nbytes, flags), "cuMemHostRegister");
}

HostPages::~HostPages() {
    release_quietly(*device_, "cuMemHostUnregister", [this](Driver& driver) {
        const ContextScope scope(*device_);
        return driver.host_unregister(address_);
    });
}

CopyBatch::CopyBatch(std::shared_ptr<Device> device, const std::vector<Part>& parts)
    : device_(std::move(device)) {
    if (parts.empty()) {
        throw SizeError("a batch has 0 copies; give at least 1");
    }
    for (const Part& part : parts) {
        if (part.nbytes == 0 || part.source == nullptr || part.target == 0) {
            throw SizeError("a copy of " + std::to_string(part.nbytes) +
                            " bytes has no bytes or no address; leave it out");
        }
        (void)checked_add(reinterpret_cast<std::uintptr_t>(part.source), part.nbytes,
                          "a copy's source");
        (void)checked_add(part.target, part.nbytes, "a copy's target");
        nbytes_ = checked_add(nbytes_, part.nbytes, "a batch");
        copies_.push_back({part.source, part.nbytes, part.target, nullptr, 0});
    }
}

void CopyBatch::submit(cuda::Stream stream, const std::vector<std::shared_ptr<EventFence>>& after,
                       EventFence& ready) const {
    const ContextScope scope(*device_);
    for (const std::shared_ptr<EventFence>& fence : after) {
        fence->block_stream(stream);
    }
    try {
        enqueue_copies(*device_, copies_, /*base=*/0, stream);
    } catch (const CudaError&) {
        try {
            ready.record(stream);
        } catch (const CudaError&) {
            // The first failure tells more.
        }
        throw;
    }
    ready.record(stream);
}

}  // namespace exeunt::native
