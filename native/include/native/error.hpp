#pragma once

#include <cstddef>
#include <source_location>
#include <stdexcept>
#include <string>

#include "native/abi.hpp"

namespace exeunt::native {

/// Root of what this library throws. Each child is one Python class of native.errors.
class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// The driver library is missing, too old, or lacks what the allocator needs.
class DriverUnavailable : public Error {
  public:
    using Error::Error;
};

/// A driver call came back with a status other than success.
class CudaError : public Error {
  public:
    CudaError(cuda::Status status, const char* call, const std::source_location& where);
    cuda::Status status;
    const char* call;
};

/// Device or pinned bytes that neither the limit nor the device has left.
class OutOfMemory : public Error {
  public:
    OutOfMemory(const char* what, std::size_t requested_bytes, std::size_t free_bytes,
                std::size_t limit_bytes, std::size_t largest_bytes);
    std::size_t requested_bytes;
    std::size_t free_bytes;
    std::size_t limit_bytes;
    std::size_t largest_bytes;
};

/// A size, offset or alignment that cannot be served whatever the state is.
class SizeError : public Error {
  public:
    using Error::Error;
};

/// The object is not in a state in which the call has a meaning: closed, released twice, stale.
class StateError : public Error {
  public:
    using Error::Error;
};

/// Pending work or a live view still needs the object.
class BusyError : public Error {
  public:
    using Error::Error;
};

/// The process was forked after the driver had been initialised.
class ForkedError : public Error {
  public:
    using Error::Error;
};

/// A weight file is not the one that was opened.
class FileChanged : public Error {
  public:
    using Error::Error;
};

/// An operating system call on a file failed.
class FileError : public Error {
  public:
    FileError(const std::string& what, int error_number);
    int error_number;
};

/// "CUDA_ERROR_..." of a status, or its number.
[[nodiscard]] std::string status_name(cuda::Status status);

/// Throws CudaError unless `status` is success (invariant 6). `call` names the driver function.
void check(cuda::Status status, const char* call,
           const std::source_location& where = std::source_location::current());

}  // namespace exeunt::native
