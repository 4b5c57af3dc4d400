// The device guard of ``port``, which autograd asks several times per operator. PyTorch's guard for devices that are
// defined in Python gives the same answers, but calls Python for the device type each time.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType kPort = c10::DeviceType::PrivateUse1;

// One device, one stream, nothing to wait for: torchport alone knows what is pending.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kPort; }
  c10::Device getDevice() const override { return {kPort, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
};

} // namespace

// Twin of ``frontend.device.register._Guard``.
extern "C" void torchport_use_guard() {
  static const auto& guard = *new Guard(); // never freed: threads may use the guard while the process ends
  c10::impl::registerDeviceGuard(kPort, &guard);
}
