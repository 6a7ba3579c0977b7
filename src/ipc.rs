//! Placeholder until the module lands.
use crate::driver::{CuError, CuResult, DevicePtr, Driver};
use crate::source::Shareable;
pub fn is_ours(_h: &[u8; 64]) -> bool {
    false
}
pub fn publish(_d: &'static Driver, _e: Shareable, _key: u64) -> CuResult<[u8; 64]> {
    Err(CuError::NOT_SUPPORTED)
}
pub fn withdraw(_key: u64) {}
pub fn open(_d: &'static Driver, _h: &[u8; 64]) -> CuResult<DevicePtr> {
    Err(CuError::NOT_SUPPORTED)
}
pub fn close(_d: &'static Driver, _p: DevicePtr) -> Option<CuResult<()>> {
    None
}
pub fn range_of(_p: DevicePtr) -> Option<(DevicePtr, usize)> {
    None
}
