#include <dlfcn.h>

#include <string>
#include <utility>

#include "native/driver.hpp"
#include "native/error.hpp"
#include "native/fork.hpp"

namespace exeunt::native {

namespace {

using cuda::Status;

/// libcuda.so.1, held open for as long as a table points into it.
class Library {
  public:
    Library() : handle_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) {
            const char* message = dlerror();
            throw DriverUnavailable(std::string("no CUDA driver: ") +
                                    (message != nullptr ? message : "libcuda.so.1") +
                                    "; install the NVIDIA driver or use the fake one");
        }
    }
    ~Library() { dlclose(handle_); }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    [[nodiscard]] void* symbol(const char* name) const { return dlsym(handle_, name); }

  private:
    void* handle_;
};

/// Fills function pointers through cuGetProcAddress at the pinned version.
class EntryPoints {
  public:
    explicit EntryPoints(const Library& library)
        : newer_(reinterpret_cast<Newer>(library.symbol("cuGetProcAddress_v2"))),
          older_(reinterpret_cast<Older>(library.symbol("cuGetProcAddress"))) {
        if (newer_ == nullptr && older_ == nullptr) {
            throw DriverUnavailable(
                "libcuda.so.1 has no cuGetProcAddress: the driver is older than CUDA 11.4; "
                "update it");
        }
    }

    template <typename Function>
    void load(Function& target, const char* name) const {
        void* found = nullptr;
        int reason = 0;
        const Status status = newer_ != nullptr
                                  ? newer_(name, &found, cuda::kPinnedVersion, 0, &reason)
                                  : older_(name, &found, cuda::kOldestVersion, 0);
        if (status != Status::kSuccess || found == nullptr) {
            throw DriverUnavailable(std::string("the driver has no ") + name + " of CUDA " +
                                    std::to_string(cuda::kPinnedVersion / 1000) +
                                    "; update the driver");
        }
        target = reinterpret_cast<Function>(found);
    }

  private:
    using Newer = Status (*)(const char*, void**, int, std::uint64_t, int*);
    using Older = Status (*)(const char*, void**, int, std::uint64_t);
    Newer newer_;
    Older older_;
};

using DevicePtr = cuda::DevicePtr;
using Handle = cuda::AllocationHandle;

struct Table {
    Status (*init)(unsigned);
    Status (*driver_version)(int*);
    Status (*device_count)(int*);
    Status (*device_name)(char*, int, int);
    Status (*device_attribute)(int*, int, int);
    Status (*context_retain)(cuda::Context*, int);
    Status (*context_release)(int);
    Status (*context_current)(cuda::Context*);
    Status (*context_push)(cuda::Context);
    Status (*context_pop)(cuda::Context*);
    Status (*context_synchronize)();
    Status (*memory_info)(std::size_t*, std::size_t*);
    Status (*granularity)(std::size_t*, const cuda::AllocationProp*, int);
    Status (*address_reserve)(DevicePtr*, std::size_t, std::size_t, DevicePtr, std::uint64_t);
    Status (*address_free)(DevicePtr, std::size_t);
    Status (*memory_create)(Handle*, std::size_t, const cuda::AllocationProp*, std::uint64_t);
    Status (*memory_release)(Handle);
    Status (*memory_map)(DevicePtr, std::size_t, std::size_t, Handle, std::uint64_t);
    Status (*memory_unmap)(DevicePtr, std::size_t);
    Status (*memory_set_access)(DevicePtr, std::size_t, const cuda::AccessDesc*, std::size_t);
    Status (*host_register)(void*, std::size_t, unsigned);
    Status (*host_unregister)(void*);
    Status (*host_alloc)(void**, std::size_t, unsigned);
    Status (*host_free)(void*);
    Status (*copy_to_device)(DevicePtr, const void*, std::size_t, cuda::Stream);
    Status (*copy_to_host)(void*, DevicePtr, std::size_t, cuda::Stream);
    Status (*stream_create)(cuda::Stream*, unsigned);
    Status (*stream_destroy)(cuda::Stream);
    Status (*stream_synchronize)(cuda::Stream);
    Status (*stream_wait_event)(cuda::Stream, cuda::Event, unsigned);
    Status (*event_create)(cuda::Event*, unsigned);
    Status (*event_destroy)(cuda::Event);
    Status (*event_record)(cuda::Event, cuda::Stream);
    Status (*event_query)(cuda::Event);
    Status (*event_synchronize)(cuda::Event);
    Status (*event_elapsed)(float*, cuda::Event, cuda::Event);
};

Table load_table(const Library& library) {
    const EntryPoints entry(library);
    Table table{};
    entry.load(table.init, "cuInit");
    entry.load(table.driver_version, "cuDriverGetVersion");
    entry.load(table.device_count, "cuDeviceGetCount");
    entry.load(table.device_name, "cuDeviceGetName");
    entry.load(table.device_attribute, "cuDeviceGetAttribute");
    entry.load(table.context_retain, "cuDevicePrimaryCtxRetain");
    entry.load(table.context_release, "cuDevicePrimaryCtxRelease");
    entry.load(table.context_current, "cuCtxGetCurrent");
    entry.load(table.context_push, "cuCtxPushCurrent");
    entry.load(table.context_pop, "cuCtxPopCurrent");
    entry.load(table.context_synchronize, "cuCtxSynchronize");
    entry.load(table.memory_info, "cuMemGetInfo");
    entry.load(table.granularity, "cuMemGetAllocationGranularity");
    entry.load(table.address_reserve, "cuMemAddressReserve");
    entry.load(table.address_free, "cuMemAddressFree");
    entry.load(table.memory_create, "cuMemCreate");
    entry.load(table.memory_release, "cuMemRelease");
    entry.load(table.memory_map, "cuMemMap");
    entry.load(table.memory_unmap, "cuMemUnmap");
    entry.load(table.memory_set_access, "cuMemSetAccess");
    entry.load(table.host_register, "cuMemHostRegister");
    entry.load(table.host_unregister, "cuMemHostUnregister");
    entry.load(table.host_alloc, "cuMemHostAlloc");
    entry.load(table.host_free, "cuMemFreeHost");
    entry.load(table.copy_to_device, "cuMemcpyHtoDAsync");
    entry.load(table.copy_to_host, "cuMemcpyDtoHAsync");
    entry.load(table.stream_create, "cuStreamCreate");
    entry.load(table.stream_destroy, "cuStreamDestroy");
    entry.load(table.stream_synchronize, "cuStreamSynchronize");
    entry.load(table.stream_wait_event, "cuStreamWaitEvent");
    entry.load(table.event_create, "cuEventCreate");
    entry.load(table.event_destroy, "cuEventDestroy");
    entry.load(table.event_record, "cuEventRecord");
    entry.load(table.event_query, "cuEventQuery");
    entry.load(table.event_synchronize, "cuEventSynchronize");
    entry.load(table.event_elapsed, "cuEventElapsedTime");
    return table;
}

class CudaDriver final : public Driver {
  public:
    CudaDriver() : table_(load_table(library_)) {}
    [[nodiscard]] bool is_fake() const noexcept override { return false; }

    Status init() override { return invoke(table_.init, 0U); }
    Status driver_version(int* version) override { return invoke(table_.driver_version, version); }
    Status device_count(int* count) override { return invoke(table_.device_count, count); }
    Status device_name(char* name, int capacity, int ordinal) override {
        return invoke(table_.device_name, name, capacity, ordinal);
    }
    // A device's driver handle equals its ordinal: cuDeviceGet is documented as that lookup.
    Status device_attribute(int* value, cuda::Attribute attribute, int ordinal) override {
        return invoke(table_.device_attribute, value, static_cast<int>(attribute), ordinal);
    }
    Status primary_context_retain(cuda::Context* context, int ordinal) override {
        return invoke(table_.context_retain, context, ordinal);
    }
    Status primary_context_release(int ordinal) override {
        return invoke(table_.context_release, ordinal);
    }
    Status context_current(cuda::Context* context) override {
        return invoke(table_.context_current, context);
    }
    Status context_push(cuda::Context context) override {
        return invoke(table_.context_push, context);
    }
    Status context_pop(cuda::Context* context) override {
        return invoke(table_.context_pop, context);
    }
    Status context_synchronize() override { return invoke(table_.context_synchronize); }
    Status memory_info(std::size_t* free_bytes, std::size_t* total_bytes) override {
        return invoke(table_.memory_info, free_bytes, total_bytes);
    }
    Status granularity(std::size_t* nbytes, const cuda::AllocationProp& prop) override {
        return invoke(table_.granularity, nbytes, &prop, cuda::kGranularityMinimum);
    }
    Status address_reserve(DevicePtr* base, std::size_t nbytes) override {
        return invoke(table_.address_reserve, base, nbytes, std::size_t{0}, DevicePtr{0},
                      std::uint64_t{0});
    }
    Status address_free(DevicePtr base, std::size_t nbytes) override {
        return invoke(table_.address_free, base, nbytes);
    }
    Status memory_create(Handle* handle, std::size_t nbytes,
                         const cuda::AllocationProp& prop) override {
        return invoke(table_.memory_create, handle, nbytes, &prop, std::uint64_t{0});
    }
    Status memory_release(Handle handle) override { return invoke(table_.memory_release, handle); }
    Status memory_map(DevicePtr address, std::size_t nbytes, Handle handle) override {
        return invoke(table_.memory_map, address, nbytes, std::size_t{0}, handle, std::uint64_t{0});
    }
    Status memory_unmap(DevicePtr address, std::size_t nbytes) override {
        return invoke(table_.memory_unmap, address, nbytes);
    }
    Status memory_set_access(DevicePtr address, std::size_t nbytes,
                             const cuda::AccessDesc& access) override {
        return invoke(table_.memory_set_access, address, nbytes, &access, std::size_t{1});
    }
    Status host_register(void* address, std::size_t nbytes, unsigned flags) override {
        return invoke(table_.host_register, address, nbytes, flags);
    }
    Status host_unregister(void* address) override {
        return invoke(table_.host_unregister, address);
    }
    Status host_alloc(void** address, std::size_t nbytes) override {
        return invoke(table_.host_alloc, address, nbytes, cuda::kHostRegisterPortable);
    }
    Status host_free(void* address) override { return invoke(table_.host_free, address); }
    Status copy_to_device(DevicePtr target, const void* source, std::size_t nbytes,
                          cuda::Stream stream) override {
        return invoke(table_.copy_to_device, target, source, nbytes, stream);
    }
    Status copy_to_host(void* target, DevicePtr source, std::size_t nbytes,
                        cuda::Stream stream) override {
        return invoke(table_.copy_to_host, target, source, nbytes, stream);
    }
    Status stream_create(cuda::Stream* stream) override {
        return invoke(table_.stream_create, stream, cuda::kStreamNonBlocking);
    }
    Status stream_destroy(cuda::Stream stream) override {
        return invoke(table_.stream_destroy, stream);
    }
    Status stream_synchronize(cuda::Stream stream) override {
        return invoke(table_.stream_synchronize, stream);
    }
    Status stream_wait_event(cuda::Stream stream, cuda::Event event) override {
        return invoke(table_.stream_wait_event, stream, event, 0U);
    }
    Status event_create(cuda::Event* event, unsigned flags) override {
        return invoke(table_.event_create, event, flags);
    }
    Status event_destroy(cuda::Event event) override { return invoke(table_.event_destroy, event); }
    Status event_record(cuda::Event event, cuda::Stream stream) override {
        return invoke(table_.event_record, event, stream);
    }
    Status event_query(cuda::Event event) override { return invoke(table_.event_query, event); }
    Status event_synchronize(cuda::Event event) override {
        return invoke(table_.event_synchronize, event);
    }
    Status event_elapsed_ms(float* elapsed, cuda::Event begin, cuda::Event end) override {
        return invoke(table_.event_elapsed, elapsed, begin, end);
    }

  private:
    template <typename... Parameters, typename... Arguments>
    Status invoke(Status (*function)(Parameters...), Arguments... arguments) {
        if (const Status fault = begin_call(); fault != Status::kSuccess) {
            return fault;
        }
        return function(arguments...);
    }

    Library library_;
    Table table_;
};

}  // namespace

std::shared_ptr<Driver> open_cuda_driver() {
    auto driver = std::make_shared<CudaDriver>();
    watch_forks();
    if (const Status status = driver->init(); status != Status::kSuccess) {
        throw DriverUnavailable("cuInit returned " + status_name(status) +
                                "; check that a GPU is visible to this process");
    }
    return driver;
}

}  // namespace exeunt::native
