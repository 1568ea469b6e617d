#include "native/error.hpp"

#include <cstring>

namespace exeunt::native {

namespace {

std::string describe(cuda::Status status, const char* call, const std::source_location& where) {
    return std::string(call) + " returned " + status_name(status) + " in " + where.function_name();
}

}  // namespace

std::string status_name(cuda::Status status) {
    switch (status) {
        case cuda::Status::kSuccess:
            return "CUDA_SUCCESS";
        case cuda::Status::kInvalidValue:
            return "CUDA_ERROR_INVALID_VALUE";
        case cuda::Status::kOutOfMemory:
            return "CUDA_ERROR_OUT_OF_MEMORY";
        case cuda::Status::kNotInitialized:
            return "CUDA_ERROR_NOT_INITIALIZED";
        case cuda::Status::kDeinitialized:
            return "CUDA_ERROR_DEINITIALIZED";
        case cuda::Status::kNoDevice:
            return "CUDA_ERROR_NO_DEVICE";
        case cuda::Status::kInvalidDevice:
            return "CUDA_ERROR_INVALID_DEVICE";
        case cuda::Status::kInvalidContext:
            return "CUDA_ERROR_INVALID_CONTEXT";
        case cuda::Status::kMapFailed:
            return "CUDA_ERROR_MAP_FAILED";
        case cuda::Status::kAlreadyMapped:
            return "CUDA_ERROR_ALREADY_MAPPED";
        case cuda::Status::kNotMapped:
            return "CUDA_ERROR_NOT_MAPPED";
        case cuda::Status::kOperatingSystem:
            return "CUDA_ERROR_OPERATING_SYSTEM";
        case cuda::Status::kInvalidHandle:
            return "CUDA_ERROR_INVALID_HANDLE";
        case cuda::Status::kNotFound:
            return "CUDA_ERROR_NOT_FOUND";
        case cuda::Status::kNotReady:
            return "CUDA_ERROR_NOT_READY";
        case cuda::Status::kIllegalAddress:
            return "CUDA_ERROR_ILLEGAL_ADDRESS";
        case cuda::Status::kContextIsDestroyed:
            return "CUDA_ERROR_CONTEXT_IS_DESTROYED";
        case cuda::Status::kHostMemoryAlreadyRegistered:
            return "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
        case cuda::Status::kHostMemoryNotRegistered:
            return "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
        case cuda::Status::kNotSupported:
            return "CUDA_ERROR_NOT_SUPPORTED";
        case cuda::Status::kUnknown:
            return "CUDA_ERROR_UNKNOWN";
    }
    return "CUDA status " + std::to_string(static_cast<int>(status));
}

CudaError::CudaError(cuda::Status failed, const char* name, const std::source_location& where)
    : Error(describe(failed, name, where)), status(failed), call(name) {}

OutOfMemory::OutOfMemory(const char* what, std::size_t requested, std::size_t free,
                         std::size_t limit, std::size_t largest)
    : Error(std::string(what) + " needs " + std::to_string(requested) + " bytes but " +
            std::to_string(free) + " of " + std::to_string(limit) +
            " bytes are free; free some or raise the limit"),
      requested_bytes(requested),
      free_bytes(free),
      limit_bytes(limit),
      largest_bytes(largest) {}

FileError::FileError(const std::string& what, int number)
    : Error(what + ": " + std::strerror(number)), error_number(number) {}

void check(cuda::Status status, const char* call, const std::source_location& where) {
    if (status != cuda::Status::kSuccess) {
        throw CudaError(status, call, where);
    }
}

}  // namespace exeunt::native
