#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "harness.hpp"
#include "native/arena.hpp"
#include "native/fake_driver.hpp"
#include "native/host_source.hpp"
#include "native/readback.hpp"
#include "native/transfer_ring.hpp"

namespace exeunt::test {

using namespace exeunt::native;

inline constexpr std::size_t kPage = std::size_t{64} << 10;

/// A temporary file of random bytes, gone with its object.
class WeightFile {
  public:
    explicit WeightFile(std::size_t nbytes, std::uint64_t seed = 1) : bytes(nbytes) {
        std::mt19937_64 random(seed);
        for (char& byte : bytes) {
            byte = static_cast<char>(random());
        }
        char name[] = "/tmp/native_weights_XXXXXX";
        const int file = mkstemp(name);
        if (file < 0 || write(file, bytes.data(), nbytes) != static_cast<ssize_t>(nbytes)) {
            throw Failure("no temporary file");
        }
        ::close(file);
        path = name;
    }
    ~WeightFile() { unlink(path.c_str()); }
    WeightFile(const WeightFile&) = delete;
    WeightFile& operator=(const WeightFile&) = delete;

    [[nodiscard]] std::string part(std::size_t offset, std::size_t nbytes) const {
        return {bytes.data() + offset, nbytes};
    }

    std::string path;
    std::vector<char> bytes;
};

/// A fake device with an arena, and at its end a look for what correct use never does.
struct Rig {
    explicit Rig(FakeOptions options = {}, std::size_t limit_bytes = 64 * kPage)
        : driver(std::make_shared<FakeDriver>(options)),
          device(std::make_shared<Device>(driver, 0)),
          arena(std::make_shared<Arena>(device, ArenaOptions{limit_bytes, 1024 * kPage})),
          host_budget(std::make_shared<Budget>(std::size_t{64} << 20)) {}

    std::shared_ptr<HostSource> open(const std::string& path) const {
        return std::make_shared<HostSource>(device, host_budget,
                                            std::make_shared<FileMapping>(path));
    }
    /// Bytes that a consumer on `stream` sees at `address`, once its work has run.
    std::unique_ptr<Readback> read(cuda::DevicePtr address, std::size_t nbytes,
                                   cuda::Stream stream) const {
        auto readback = std::make_unique<Readback>(device, host_budget, nbytes);
        readback->enqueue(address, nbytes, stream);
        return readback;
    }
    void check_clean() const {
        for (const std::string& violation : driver->violations()) {
            throw Failure("the driver saw: " + violation);
        }
    }

    std::shared_ptr<FakeDriver> driver;
    std::shared_ptr<Device> device;
    std::shared_ptr<Arena> arena;
    std::shared_ptr<Budget> host_budget;
};

inline FakeOptions delayed(std::uint64_t seed = 0) {
    FakeOptions options;
    options.is_delayed = true;
    options.seed = seed;
    return options;
}

}  // namespace exeunt::test
