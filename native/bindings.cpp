#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "native/arena.hpp"
#include "native/copy_batch.hpp"
#include "native/error.hpp"
#include "native/export.hpp"
#include "native/fake_driver.hpp"
#include "native/host_source.hpp"
#include "native/readback.hpp"
#include "native/staged_batch.hpp"
#include "native/staging_ring.hpp"
#include "native/torch_route.hpp"
#include "native/transfer_ring.hpp"

// The stub _core.pyi holds the types and the docstrings.

namespace py = pybind11;
using namespace py::literals;
using namespace exeunt::native;

namespace {

/// Every call that may take a lock or reach the driver runs without the GIL (invariant 9).
using Unlocked = py::call_guard<py::gil_scoped_release>;
using NoGilDestructor = py::release_gil_before_calling_cpp_dtor;

cuda::Stream to_stream(std::uint64_t handle) { return reinterpret_cast<cuda::Stream>(handle); }

using StreamOrHandle = std::variant<std::shared_ptr<Stream>, std::uint64_t>;

ViewStream to_view_stream(const StreamOrHandle& stream) {
    if (const auto* owned = std::get_if<std::shared_ptr<Stream>>(&stream)) {
        if (*owned == nullptr) {
            throw py::type_error("a view's stream is None; give a Stream or a handle");
        }
        return {(*owned)->handle(), *owned};
    }
    return {to_stream(std::get<std::uint64_t>(stream)), nullptr};
}

template <typename... Arguments>
void raise(const char* name, const Error& error, Arguments&&... arguments) {
    const py::object type = py::module_::import("native.errors").attr(name);
    PyErr_SetObject(type.ptr(), type(error.what(), std::forward<Arguments>(arguments)...).ptr());
}

void translate(std::exception_ptr thrown) {
    try {
        std::rethrow_exception(std::move(thrown));
    } catch (const CudaError& error) {
        raise("CudaError", error, "status"_a = static_cast<int>(error.status),
              "status_name"_a = status_name(error.status), "call"_a = error.call);
    } catch (const OutOfMemory& error) {
        raise("OutOfMemoryError", error, "requested_bytes"_a = error.requested_bytes,
              "free_bytes"_a = error.free_bytes, "limit_bytes"_a = error.limit_bytes,
              "largest_bytes"_a = error.largest_bytes);
    } catch (const FileError& error) {
        raise("FileAccessError", error, "errno"_a = error.error_number);
    } catch (const DriverUnavailable& error) {
        raise("DriverUnavailableError", error);
    } catch (const SizeError& error) {
        raise("SizeError", error);
    } catch (const StateError& error) {
        raise("StateError", error);
    } catch (const BusyError& error) {
        raise("BusyError", error);
    } catch (const ForkedError& error) {
        raise("ForkedError", error);
    } catch (const FileChanged& error) {
        raise("FileChangedError", error);
    }
}

constexpr const char* kCapsuleName = "dltensor";

/// A capsule that ends its view unless a consumer has taken it over, by renaming it.
py::capsule to_capsule(dlpack::ManagedTensor* view) {
    PyObject* capsule = PyCapsule_New(view, kCapsuleName, [](PyObject* self) {
        if (PyCapsule_IsValid(self, kCapsuleName) != 0) {
            auto* unused =
                static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(self, kCapsuleName));
            unused->deleter(unused);
        }
    });
    if (capsule == nullptr) {
        view->deleter(view);
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::capsule>(capsule);
}

using ByUse = std::map<std::string, std::size_t>;

ByUse device_bytes(const std::array<std::size_t, kNumUses>& numbers) {
    return {{"weights", numbers[0]}, {"ring", numbers[1]}, {"torch", numbers[2]}};
}

ByUse host_bytes(const std::array<std::size_t, kNumUses>& numbers) {
    return {{"registered", numbers[0]}, {"slab", numbers[1]}, {"staging", numbers[2]}};
}

using PartTuple = std::tuple<std::uint64_t, std::size_t, cuda::DevicePtr>;
using ItemTuple = std::tuple<std::shared_ptr<HostSource>, std::size_t, std::size_t, std::size_t>;

using FilePartTuple =
    std::tuple<std::shared_ptr<FileMapping>, std::size_t, std::size_t, cuda::DevicePtr>;

std::vector<CopyBatch::Part> to_parts(const std::vector<PartTuple>& tuples) {
    std::vector<CopyBatch::Part> parts;
    for (const auto& [source, nbytes, target] : tuples) {
        parts.push_back({reinterpret_cast<const std::byte*>(source), nbytes, target});
    }
    return parts;
}

std::shared_ptr<StagedBatch> make_staged_batch(const std::shared_ptr<StagingRing>& staging,
                                               const std::vector<PartTuple>& direct,
                                               const std::vector<FilePartTuple>& from_files,
                                               const std::vector<PartTuple>& from_memory) {
    std::vector<StagedBatch::Part> staged;
    for (const auto& [file, offset, nbytes, target] : from_files) {
        if (file == nullptr) {
            throw SizeError("a staged copy has no file; give a FileMapping");
        }
        staged.push_back({file, offset, nullptr, nbytes, target});
    }
    for (const CopyBatch::Part& part : to_parts(from_memory)) {
        staged.push_back({nullptr, 0, part.source, part.nbytes, part.target});
    }
    return std::make_shared<StagedBatch>(staging, to_parts(direct), staged);
}

std::shared_ptr<Unit> make_unit(const std::vector<ItemTuple>& tuples) {
    std::vector<UnitItem> items;
    for (const auto& [source, file_offset, nbytes, target_offset] : tuples) {
        if (source == nullptr) {
            throw py::type_error("a unit's item has no source; give a HostSource");
        }
        items.push_back({source, file_offset, nbytes, target_offset});
    }
    return std::make_shared<Unit>(std::move(items));
}

void bind_enums(py::module_& m) {
    py::native_enum<RangeState>(m, "RangeState", "enum.Enum")
        .value("RESERVED", RangeState::kReserved)
        .value("COMMITTED", RangeState::kCommitted)
        .value("DRAINING", RangeState::kDraining)
        .value("RETIRED", RangeState::kRetired)
        .finalize();
    py::native_enum<SlotState>(m, "SlotState", "enum.Enum")
        .value("FREE", SlotState::kFree)
        .value("FILLING", SlotState::kFilling)
        .value("READY", SlotState::kReady)
        .value("IN_USE", SlotState::kInUse)
        .value("DRAINING", SlotState::kDraining)
        .finalize();
    py::native_enum<DeviceUse>(m, "DeviceUse", "enum.Enum")
        .value("WEIGHTS", DeviceUse::kWeights)
        .value("RING", DeviceUse::kRing)
        .value("TORCH", DeviceUse::kTorch)
        .finalize();
    py::native_enum<Hold>(m, "Hold", "enum.Enum")
        .value("PAGES", Hold::kPages)
        .value("ADDRESS", Hold::kAddress)
        .finalize();
    py::native_enum<TierOutcome>(m, "TierOutcome", "enum.Enum")
        .value("COMPLETE", TierOutcome::kComplete)
        .value("LIMIT", TierOutcome::kLimit)
        .value("UNSUPPORTED", TierOutcome::kUnsupported)
        .value("REFUSED", TierOutcome::kRefused)
        .finalize();
}

void bind_driver(py::module_& m) {
    py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver")
        .def_property_readonly("is_fake", &Driver::is_fake)
        .def_property_readonly("num_calls", &Driver::num_calls)
        .def_property_readonly("fault_was_delivered", &Driver::fault_was_delivered)
        .def(
            "inject_fault",
            [](Driver& driver, std::uint64_t nth, int status) {
                driver.inject_fault(nth, static_cast<cuda::Status>(status));
            },
            "nth"_a, "status"_a = static_cast<int>(cuda::Status::kUnknown));
    py::class_<FakeDriver, Driver, std::shared_ptr<FakeDriver>>(m, "FakeDriver")
        .def(py::init([](std::size_t total_bytes, std::size_t granularity, std::uint64_t seed,
                         bool is_delayed, bool has_virtual_memory, bool has_host_registration,
                         bool has_read_only_registration) {
                 FakeOptions options;
                 options.total_bytes = total_bytes;
                 options.granularity = granularity;
                 options.seed = seed;
                 options.is_delayed = is_delayed;
                 options.has_virtual_memory = has_virtual_memory;
                 options.has_host_registration = has_host_registration;
                 options.has_read_only_registration = has_read_only_registration;
                 return std::make_shared<FakeDriver>(options);
             }),
             py::kw_only(), "total_bytes"_a = FakeOptions{}.total_bytes,
             "granularity"_a = FakeOptions{}.granularity, "seed"_a = 0, "is_delayed"_a = false,
             "has_virtual_memory"_a = true, "has_host_registration"_a = true,
             "has_read_only_registration"_a = true)
        .def("advance", &FakeDriver::advance, Unlocked())
        .def("run_all", &FakeDriver::run_all, Unlocked())
        .def("set_delayed", &FakeDriver::set_delayed, Unlocked(), "is_delayed"_a)
        .def(
            "launch",
            [](FakeDriver& driver, std::uint64_t stream, double milliseconds) {
                check(driver.launch(to_stream(stream), milliseconds), "launch");
            },
            Unlocked(), "stream"_a, "milliseconds"_a)
        .def_property_readonly("num_pending", &FakeDriver::num_pending)
        .def("violations", &FakeDriver::violations)
        .def("driver_objects", [](const FakeDriver& driver) {
            const auto objects = driver.driver_objects();
            return std::map<std::string, std::size_t>(objects.begin(), objects.end());
        });
    m.def("open_driver", &open_cuda_driver, Unlocked());
    py::class_<Device, std::shared_ptr<Device>>(m, "Device", NoGilDestructor())
        .def(py::init<std::shared_ptr<Driver>, int>(), Unlocked(), py::arg("driver").none(false),
             "ordinal"_a = 0)
        .def_property_readonly("driver", &Device::shared_driver)
        .def_property_readonly("ordinal", &Device::ordinal)
        .def_property_readonly("name", &Device::name)
        .def_property_readonly("granularity", &Device::granularity)
        .def_property_readonly(
            "has_read_only_registration",
            [](const Device& device) { return device.capabilities().has_read_only_registration; })
        .def_property_readonly("compute_capability",
                               [](const Device& device) {
                                   return std::pair(device.capabilities().compute_major,
                                                    device.capabilities().compute_minor);
                               })
        .def("memory_info", &Device::memory_info, Unlocked())
        .def("synchronize", &Device::synchronize, Unlocked());
    py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream", NoGilDestructor())
        .def(py::init<std::shared_ptr<Device>>(), Unlocked(), py::arg("device").none(false))
        .def_property_readonly(
            "handle",
            [](const Stream& stream) { return reinterpret_cast<std::uint64_t>(stream.handle()); })
        .def("synchronize", &Stream::synchronize, Unlocked());
    py::class_<EventFence, std::shared_ptr<EventFence>>(m, "EventFence", NoGilDestructor())
        .def(py::init([](std::shared_ptr<Device> device, bool has_timing) {
                 return std::make_shared<EventFence>(
                     std::move(device),
                     has_timing ? EventFence::Timing::kEnabled : EventFence::Timing::kDisabled);
             }),
             Unlocked(), py::arg("device").none(false), py::kw_only(), "has_timing"_a = false)
        .def(
            "record",
            [](EventFence& fence, std::uint64_t stream) { fence.record(to_stream(stream)); },
            Unlocked(), "stream"_a)
        .def("is_complete", &EventFence::is_complete, Unlocked())
        .def(
            "block_stream",
            [](const EventFence& fence, std::uint64_t stream) {
                fence.block_stream(to_stream(stream));
            },
            Unlocked(), "stream"_a)
        .def("synchronize", &EventFence::synchronize, Unlocked())
        .def("elapsed_ms_since", &EventFence::elapsed_ms_since, Unlocked(), "begin"_a);
}

void bind_arena(py::module_& m) {
    py::class_<PressureEvent>(m, "PressureEvent")
        .def_readonly("requested_bytes", &PressureEvent::requested_bytes)
        .def_readonly("freed_bytes", &PressureEvent::freed_bytes)
        .def_readonly("demoted_range_ids", &PressureEvent::demoted_range_ids)
        .def_readonly("was_met", &PressureEvent::was_met);
    py::class_<ArenaStats>(m, "ArenaStats")
        .def_property_readonly("limit_bytes",
                               [](const ArenaStats& stats) { return stats.budget.limit_bytes; })
        .def_property_readonly("used_bytes",
                               [](const ArenaStats& stats) { return stats.budget.used_bytes; })
        .def_property_readonly("peak_bytes",
                               [](const ArenaStats& stats) { return stats.budget.peak_bytes; })
        .def_property_readonly(
            "used_by_use",
            [](const ArenaStats& stats) { return device_bytes(stats.budget.used_by_use); })
        .def_property_readonly(
            "peak_by_use",
            [](const ArenaStats& stats) { return device_bytes(stats.budget.peak_by_use); })
        .def_readonly("address_bytes", &ArenaStats::address_bytes)
        .def_readonly("free_address_bytes", &ArenaStats::free_address_bytes)
        .def_readonly("largest_free_address_bytes", &ArenaStats::largest_free_address_bytes)
        .def_readonly("num_ranges", &ArenaStats::num_ranges)
        .def_readonly("num_draining", &ArenaStats::num_draining)
        .def_readonly("num_commits", &ArenaStats::num_commits)
        .def_readonly("num_demotions", &ArenaStats::num_demotions)
        .def_readonly("num_pressure_events", &ArenaStats::num_pressure_events)
        .def_readonly("num_out_of_memory", &ArenaStats::num_out_of_memory);
    py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena", NoGilDestructor())
        .def(py::init([](std::shared_ptr<Device> device, std::size_t limit_bytes,
                         std::size_t reserve_bytes) {
                 return std::make_shared<Arena>(std::move(device),
                                                ArenaOptions{limit_bytes, reserve_bytes});
             }),
             Unlocked(), py::arg("device").none(false), py::kw_only(), "limit_bytes"_a,
             "reserve_bytes"_a)
        .def("reserve", &Arena::reserve, Unlocked(), "nbytes"_a, py::kw_only(), "alignment"_a = 256,
             "use"_a = DeviceUse::kWeights)
        .def("collect", &Arena::collect, Unlocked())
        .def("reclaim", &Arena::reclaim, Unlocked(), "nbytes"_a)
        .def("take_pressure_events", &Arena::take_pressure_events, Unlocked())
        .def("stats", &Arena::stats, Unlocked())
        .def("close", &Arena::close, Unlocked())
        .def_property_readonly("is_closed", py::cpp_function(&Arena::is_closed, Unlocked()))
        .def_property_readonly("device", &Arena::device);
    py::class_<Range, std::shared_ptr<Range>>(m, "Range", NoGilDestructor())
        .def("commit", &Range::commit, Unlocked())
        .def("demote", &Range::demote, Unlocked())
        .def("retire", &Range::retire, Unlocked())
        .def("acquire", &Range::acquire, Unlocked())
        .def(
            "release", [](Range& range, std::uint64_t stream) { range.release(to_stream(stream)); },
            Unlocked(), "stream"_a)
        .def(
            "record_use",
            [](Range& range, std::uint64_t stream) { range.record_use(to_stream(stream)); },
            Unlocked(), "stream"_a)
        .def("set_demotion_order", &Range::set_demotion_order, Unlocked(), "order"_a)
        .def_property_readonly("state", py::cpp_function(&Range::state, Unlocked()))
        .def_property_readonly("address", py::cpp_function(&Range::address, Unlocked()))
        .def_property_readonly("nbytes", &Range::nbytes)
        .def_property_readonly("id", &Range::id)
        .def(
            "export",
            [](const std::shared_ptr<Range>& range, std::size_t offset,
               std::optional<std::size_t> nbytes, Hold hold,
               const std::vector<StreamOrHandle>& streams) {
                dlpack::ManagedTensor* view = nullptr;
                {
                    const py::gil_scoped_release unlocked;
                    const std::size_t rest =
                        offset < range->nbytes() ? range->nbytes() - offset : 0;
                    std::vector<ViewStream> users;
                    for (const StreamOrHandle& stream : streams) {
                        users.push_back(to_view_stream(stream));
                    }
                    view =
                        export_view(range, offset, nbytes.value_or(rest), hold, std::move(users));
                }
                return to_capsule(view);
            },
            py::kw_only(), "offset"_a = 0, "nbytes"_a = py::none(), "hold"_a = Hold::kPages,
            "streams"_a = std::vector<StreamOrHandle>{});
    py::class_<TorchRoute>(m, "TorchRoute", NoGilDestructor())
        .def(py::init<std::shared_ptr<Arena>>(), Unlocked(), py::arg("arena").none(false))
        .def("close", &TorchRoute::close, Unlocked());
    py::class_<TorchStats>(m, "TorchStats")
        .def_readonly("num_allocations", &TorchStats::num_allocations)
        .def_readonly("num_refused", &TorchStats::num_refused)
        .def_readonly("num_segments", &TorchStats::num_segments)
        .def_readonly("segment_bytes", &TorchStats::segment_bytes);
    m.def("torch_stats", &torch_stats, Unlocked());
}

void bind_host(py::module_& m) {
    py::class_<Budget, std::shared_ptr<Budget>>(m, "HostBudget")
        .def(py::init<std::size_t>(), py::kw_only(), "limit_bytes"_a)
        .def_property_readonly("limit_bytes", &Budget::limit_bytes)
        .def_property_readonly("used_bytes",
                               [](const Budget& budget) { return budget.snapshot().used_bytes; })
        .def_property_readonly("peak_bytes",
                               [](const Budget& budget) { return budget.snapshot().peak_bytes; })
        .def_property_readonly("used_by_use", [](const Budget& budget) {
            return host_bytes(budget.snapshot().used_by_use);
        });
    py::class_<FileMapping, std::shared_ptr<FileMapping>>(m, "FileMapping")
        .def(py::init<std::string>(), Unlocked(), "path"_a)
        .def_property_readonly("path", &FileMapping::path)
        .def_property_readonly("nbytes", &FileMapping::nbytes)
        .def_property_readonly("has_direct_io", &FileMapping::has_direct_io)
        .def_property_readonly("identity",
                               [](const FileMapping& file) {
                                   const FileIdentity& identity = file.identity();
                                   return std::tuple(identity.device, identity.inode,
                                                     identity.nbytes, identity.mtime_ns);
                               })
        .def("verify", &FileMapping::verify, Unlocked());
    py::class_<TierResult>(m, "TierResult")
        .def_readonly("outcome", &TierResult::outcome)
        .def_readonly("requested_bytes", &TierResult::requested_bytes)
        .def_readonly("held_bytes", &TierResult::held_bytes)
        .def_property_readonly("status_name",
                               [](const TierResult& result) { return status_name(result.status); });
    py::class_<HostSource, std::shared_ptr<HostSource>>(m, "HostSource", NoGilDestructor())
        .def(py::init<std::shared_ptr<Device>, std::shared_ptr<Budget>,
                      std::shared_ptr<FileMapping>>(),
             Unlocked(), py::arg("device").none(false), py::arg("host_budget").none(false),
             py::arg("file").none(false))
        .def("register_pages", &HostSource::register_pages, Unlocked(), "offset"_a, "nbytes"_a,
             py::kw_only(), "window_bytes"_a = std::size_t{1} << 30)
        .def("load_slab", &HostSource::load_slab, Unlocked(), "offset"_a, "nbytes"_a)
        .def("release", &HostSource::release, Unlocked())
        .def_property_readonly("registered_bytes",
                               py::cpp_function(&HostSource::registered_bytes, Unlocked()))
        .def_property_readonly("slab_bytes", py::cpp_function(&HostSource::slab_bytes, Unlocked()));
    py::class_<Readback>(m, "Readback", NoGilDestructor())
        .def(
            py::init<const std::shared_ptr<Device>&, const std::shared_ptr<Budget>&, std::size_t>(),
            Unlocked(), py::arg("device").none(false), py::arg("host_budget").none(false),
            "nbytes"_a)
        .def(
            "enqueue",
            [](Readback& readback, std::uint64_t address, std::size_t nbytes,
               std::uint64_t stream) { readback.enqueue(address, nbytes, to_stream(stream)); },
            Unlocked(), "address"_a, "nbytes"_a, "stream"_a)
        .def("take", [](Readback& readback) {
            std::string taken;
            {
                const py::gil_scoped_release unlocked;
                taken = readback.take();
            }
            return py::bytes(taken);
        });
}

void bind_transfer(py::module_& m) {
    py::class_<Unit, std::shared_ptr<Unit>>(m, "Unit", NoGilDestructor())
        .def(py::init(&make_unit), Unlocked(), "items"_a)
        .def_property_readonly("nbytes", &Unit::nbytes)
        .def_property_readonly("target_nbytes", &Unit::target_nbytes);
    py::class_<HostPages>(m, "HostPages", NoGilDestructor())
        .def(py::init([](std::shared_ptr<Device> device, std::uint64_t address, std::size_t nbytes,
                         bool is_read_only) {
                 return std::make_unique<HostPages>(
                     std::move(device), reinterpret_cast<void*>(address), nbytes, is_read_only);
             }),
             Unlocked(), py::arg("device").none(false), "address"_a, "nbytes"_a, py::kw_only(),
             "is_read_only"_a);
    py::class_<CopyBatch, std::shared_ptr<CopyBatch>>(m, "CopyBatch", NoGilDestructor())
        .def(py::init([](std::shared_ptr<Device> device, const std::vector<PartTuple>& tuples) {
                 return std::make_shared<CopyBatch>(std::move(device), to_parts(tuples));
             }),
             Unlocked(), py::arg("device").none(false), "parts"_a)
        .def(
            "submit",
            [](const CopyBatch& batch, std::uint64_t stream,
               const std::vector<std::shared_ptr<EventFence>>& after,
               EventFence& ready) { batch.submit(to_stream(stream), after, ready); },
            Unlocked(), "stream"_a, "after"_a, "ready"_a)
        .def_property_readonly("nbytes", &CopyBatch::nbytes)
        .def_property_readonly("num_copies", &CopyBatch::num_copies);
    py::class_<StagingRing, std::shared_ptr<StagingRing>>(m, "StagingRing", NoGilDestructor())
        .def(py::init([](std::shared_ptr<Device> device, std::shared_ptr<Budget> host_budget,
                         std::size_t num_buffers, std::size_t buffer_bytes, std::size_t num_threads,
                         bool prefers_direct) {
                 return std::make_shared<StagingRing>(
                     std::move(device), host_budget,
                     StagingOptions{num_buffers, buffer_bytes, num_threads, prefers_direct});
             }),
             Unlocked(), py::arg("device").none(false), py::arg("host_budget").none(false),
             py::kw_only(), "num_buffers"_a = StagingOptions{}.num_buffers,
             "buffer_bytes"_a = StagingOptions{}.buffer_bytes,
             "num_threads"_a = StagingOptions{}.num_threads, "prefers_direct"_a = false);
    py::class_<StagedTransfer, std::shared_ptr<StagedTransfer>>(m, "StagedTransfer",
                                                                NoGilDestructor())
        .def(
            "wait",
            [](StagedTransfer& transfer, double timeout_s) {
                const auto failure = transfer.wait_for(timeout_s);
                if (failure && *failure) {
                    std::rethrow_exception(*failure);
                }
                return failure.has_value();
            },
            Unlocked(), "timeout_s"_a)
        .def_property_readonly("is_complete",
                               py::cpp_function(&StagedTransfer::is_complete, Unlocked()));
    py::class_<StagedBatch, std::shared_ptr<StagedBatch>>(m, "StagedBatch", NoGilDestructor())
        .def(py::init(&make_staged_batch), Unlocked(), py::arg("staging").none(false), "direct"_a,
             "from_files"_a, "from_memory"_a)
        .def(
            "submit",
            [](const StagedBatch& batch, std::uint64_t stream,
               const std::vector<std::shared_ptr<EventFence>>& after,
               std::shared_ptr<EventFence> ready) {
                return batch.submit(to_stream(stream), after, std::move(ready));
            },
            Unlocked(), "stream"_a, "after"_a, py::arg("ready").none(false))
        .def_property_readonly("nbytes", &StagedBatch::nbytes)
        .def_property_readonly("staged_nbytes", &StagedBatch::staged_nbytes);
    py::class_<TimingLog::Totals>(m, "TimingTotals")
        .def_readonly("milliseconds", &TimingLog::Totals::milliseconds)
        .def_readonly("nbytes", &TimingLog::Totals::nbytes)
        .def_readonly("num_measured", &TimingLog::Totals::num_measured)
        .def_readonly("num_unmeasured", &TimingLog::Totals::num_unmeasured);
    py::class_<RingStats>(m, "RingStats")
        .def_readonly("num_units", &RingStats::num_units)
        .def_readonly("num_copies", &RingStats::num_copies)
        .def_readonly("num_merged", &RingStats::num_merged)
        .def_readonly("num_full", &RingStats::num_full)
        .def_readonly("copied_bytes", &RingStats::copied_bytes)
        .def_readonly("staged_bytes", &RingStats::staged_bytes)
        .def_readonly("pageable_bytes", &RingStats::pageable_bytes)
        .def_readonly("copies", &RingStats::copies)
        .def_readonly("stalls", &RingStats::stalls);
    py::class_<TransferRing, std::shared_ptr<TransferRing>>(m, "TransferRing", NoGilDestructor())
        .def(py::init([](std::shared_ptr<Arena> arena, std::size_t num_slots,
                         std::size_t slot_nbytes, std::uint64_t copy_stream,
                         std::shared_ptr<StagingRing> staging, std::size_t timing_interval) {
                 return std::make_shared<TransferRing>(
                     std::move(arena), RingOptions{num_slots, slot_nbytes, timing_interval},
                     to_stream(copy_stream), std::move(staging));
             }),
             Unlocked(), py::arg("arena").none(false), py::kw_only(), "num_slots"_a,
             "slot_nbytes"_a, "copy_stream"_a, "staging"_a = py::none(),
             "timing_interval"_a = RingOptions{}.timing_interval)
        .def("try_submit", &TransferRing::try_submit, Unlocked(), py::arg("unit").none(false))
        .def(
            "acquire",
            [](TransferRing& ring, Ticket ticket, std::uint64_t stream) {
                ring.acquire(ticket, to_stream(stream));
            },
            Unlocked(), "ticket"_a, "stream"_a)
        .def(
            "release",
            [](TransferRing& ring, Ticket ticket, std::uint64_t stream) {
                ring.release(ticket, to_stream(stream));
            },
            Unlocked(), "ticket"_a, "stream"_a)
        .def("cancel", &TransferRing::cancel, Unlocked(), "ticket"_a)
        .def("is_current", &TransferRing::is_current, Unlocked(), "ticket"_a)
        .def("slot_of", &TransferRing::slot_of, "ticket"_a)
        .def("state", &TransferRing::state, Unlocked(), "slot"_a)
        .def("slot_address", &TransferRing::slot_address, Unlocked(), "slot"_a)
        .def_property_readonly("num_slots", &TransferRing::num_slots)
        .def_property_readonly("slot_nbytes", &TransferRing::slot_nbytes)
        .def(
            "export_slot",
            [](const TransferRing& ring, std::size_t slot) {
                dlpack::ManagedTensor* view = nullptr;
                {
                    const py::gil_scoped_release unlocked;
                    view = ring.export_slot(slot);
                }
                return to_capsule(view);
            },
            "slot"_a)
        .def("stats", &TransferRing::stats, Unlocked())
        .def("close", &TransferRing::close, Unlocked());
    m.def(
        "upload",
        [](const std::shared_ptr<Range>& range, const std::shared_ptr<Unit>& unit,
           std::uint64_t stream, const std::shared_ptr<StagingRing>& staging) {
            return upload(range, unit, to_stream(stream), staging);
        },
        Unlocked(), py::arg("range").none(false), py::arg("unit").none(false), "stream"_a,
        "staging"_a = py::none());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    py::register_local_exception_translator(&translate);
    m.def("available", [] {
        auto [is_available, reason] = probe_driver();
        return std::pair<bool, std::string>{is_available, reason};
    });
    m.def("live_objects", [] {
        const auto objects = live_objects();
        return std::map<std::string, std::size_t>(objects.begin(), objects.end());
    });
    m.def("leaks", [] {
        std::vector<std::pair<std::string, std::string>> found;
        for (const Leak& leak : leaks()) {
            found.emplace_back(leak.call, status_name(leak.status));
        }
        return found;
    });
    bind_enums(m);
    bind_driver(m);
    bind_arena(m);
    bind_host(m);
    bind_transfer(m);
}
