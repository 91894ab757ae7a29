// Makes torch believe in GPUs that aren't there, for tensors without memory. Loaded before torch (LD_PRELOAD), and under the
// name libcuda.so.1, which torch looks for when autograd asks whether a GPU is in use.
//
// torch must find no GPU while FakeTensorMode installs its guard for devices, which does nothing, and some GPUs afterwards.
static int devices = 0;

namespace c10::cuda {
__attribute__((visibility("default"))) signed char device_count() noexcept { return static_cast<signed char>(devices); }
}  // namespace c10::cuda

extern "C" void fake_devices(int count) { devices = count; }

// "No": so autograd makes no streams of its own.
extern "C" int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 0;
  return 0;
}
