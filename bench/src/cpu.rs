//! CPU time of this process.

/// Microseconds of CPU time, user and system, that this process has used.
pub(crate) fn used_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1000
}
