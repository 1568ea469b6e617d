#include "native/export.hpp"

#include "native/arena.hpp"
#include "native/live.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

namespace {

/// Owns what a view needs; the view's context points to it.
struct ExportRecord {
    ExportRecord(std::shared_ptr<Range> viewed, Hold kind, std::vector<ViewStream> users)
        : range(std::move(viewed)), hold(kind), streams(std::move(users)) {
        range->add_export(hold);
    }
    ~ExportRecord() {
        std::vector<cuda::Stream> handles;
        for (const ViewStream& stream : streams) {
            handles.push_back(stream.handle);
        }
        range->drop_export(hold, handles);
    }
    ExportRecord(const ExportRecord&) = delete;
    ExportRecord& operator=(const ExportRecord&) = delete;

    std::shared_ptr<Range> range;
    Hold hold;
    std::vector<ViewStream> streams;
    std::int64_t shape = 0;
    std::int64_t stride = 1;
    dlpack::ManagedTensor managed{};
    Live<ObjectKind::kExport> live;
};

void end_view(dlpack::ManagedTensor* self) {
    const std::unique_ptr<ExportRecord> ended(static_cast<ExportRecord*>(self->context));
}

}  // namespace

dlpack::ManagedTensor* export_view(const std::shared_ptr<Range>& range, std::size_t offset,
                                   std::size_t nbytes, Hold hold, std::vector<ViewStream> streams) {
    check_within(offset, nbytes, range->nbytes(), "a view");
    auto record = std::make_unique<ExportRecord>(range, hold, std::move(streams));
    const Device& device = *range->arena()->device();
    record->shape = static_cast<std::int64_t>(nbytes);
    dlpack::Tensor& tensor = record->managed.tensor;
    tensor.data = reinterpret_cast<void*>(range->address() + offset);
    tensor.device = device.driver().is_fake() ? dlpack::Device{dlpack::kCpu, 0}
                                              : dlpack::Device{dlpack::kCuda, device.ordinal()};
    tensor.ndim = 1;
    tensor.dtype = {dlpack::kUnsigned, 8, 1};
    tensor.shape = &record->shape;
    tensor.strides = &record->stride;
    record->managed.context = record.get();
    record->managed.deleter = end_view;
    return &record.release()->managed;
}

}  // namespace exeunt::native
