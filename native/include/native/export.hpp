#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "native/range.hpp"

namespace exeunt::native {

// The exchange format of array libraries (DLPack 0.x), by its binary interface.
namespace dlpack {

struct Device {
    std::int32_t type;
    std::int32_t id;
};

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct ManagedTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor* self);
};

inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::uint8_t kUnsigned = 1;

static_assert(sizeof(Tensor) == 48);
static_assert(offsetof(Tensor, device) == 8 && offsetof(Tensor, ndim) == 16);
static_assert(offsetof(Tensor, dtype) == 20 && offsetof(Tensor, shape) == 24);
static_assert(sizeof(ManagedTensor) == 64);

}  // namespace dlpack

/// A stream whose work a view waits for when it ends. A borrowed stream has to outlive the view, as
/// torch's do, which are never destroyed; an owned one is kept alive by it.
struct ViewStream {
    cuda::Stream handle = nullptr;
    std::shared_ptr<const Stream> owner;
};

/// A view of `[offset, offset + nbytes)` of a committed range as uint8, shape `(nbytes,)`, without
/// a copy. The caller owns it and ends it by its deleter, from any thread. Device memory of the
/// fake driver is host memory and says so. When the view ends, the work that `streams` have then
/// counts as a use of the range: so memory may be dropped while kernels that read it are queued.
[[nodiscard]] dlpack::ManagedTensor* export_view(const std::shared_ptr<Range>& range,
                                                 std::size_t offset, std::size_t nbytes, Hold hold,
                                                 std::vector<ViewStream> streams = {});

}  // namespace exeunt::native
