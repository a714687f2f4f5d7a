// What torch asks of a CUDA device while it traces and compiles for one, in a build of torch for CPUs.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct NoGpuGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device first() { return Device(DeviceType::CUDA, 0); }
  static Stream only() { return Stream(Stream::DEFAULT, first()); }
  Device exchangeDevice(Device) const override { return first(); }
  Device getDevice() const override { return first(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, NoGpuGuard);
}  // namespace c10::impl

namespace at {
struct NoGpuHooks : CUDAHooksInterface {
  explicit NoGpuHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, NoGpuHooks)
}  // namespace at

namespace at::native {
// Flash attention (1) in 16 bits without a mask, memory-efficient attention (2) otherwise, the formula (0) where that takes no
// grouped heads: what an H200 chooses for the usual sizes.
static int64_t choice(const Tensor& q, const Tensor&, const Tensor& v, const std::optional<Tensor>& mask, double, bool,
                      std::optional<double>, bool grouped) {
  const bool masked = mask.has_value() && mask->defined();
  const bool short_floats = q.scalar_type() == kBFloat16 || q.scalar_type() == kHalf;
  if (short_floats && !masked && q.sym_size(-1) == v.sym_size(-1)) return 1;
  return grouped ? 0 : 2;
}
static const bool registered = [] { _fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choice); return true; }();
}  // namespace at::native
