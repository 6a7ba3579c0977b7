//! The doors: what programs call. Thin: check the arguments, find the pool, call it once, translate the error. Every exported
//! function runs inside `guard`.

pub mod cnmem;
pub mod gpupool;
pub mod guard;
pub mod torch;
