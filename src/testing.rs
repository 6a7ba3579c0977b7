//! For unit tests: simcuda, faults and delays on demand, and a small random generator.

use std::ffi::{CString, c_char, c_uint, c_void};

use parking_lot::{Mutex, MutexGuard};

use crate::driver::{Context, Driver, Stream, driver};

/// xorshift64*: repeatable, good enough to pick operations.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }
}

/// simcuda, held by one test at a time: faults and delays are the whole process's.
pub struct Sim {
    pub driver: &'static Driver,
    lib: *mut c_void,
    _alone: MutexGuard<'static, ()>,
}

// SAFETY: `lib` is a handle of dlopen, good in every thread; the guard stays with the test that made it.
unsafe impl Sync for Sim {}

pub fn sim() -> Sim {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock();
    let driver = driver().expect("these tests run on simcuda: LD_LIBRARY_PATH=target/simcuda (make test sets it)");
    // SAFETY: the library is loaded already; its name is NUL-terminated.
    let lib = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    let sim = Sim { driver, lib, _alone: alone };
    sim.fail("");
    sim.delay_us(0);
    sim
}

type Raw = *mut c_void;

impl Sim {
    fn symbol(&self, name: &str) -> *mut c_void {
        let c = CString::new(name).unwrap();
        // SAFETY: an open handle and a NUL-terminated name.
        let p = unsafe { libc::dlsym(self.lib, c.as_ptr()) };
        assert!(!p.is_null(), "libcuda.so.1 has no {name}: is it simcuda?");
        p
    }

    /// Makes device `ordinal`'s primary context current on this thread.
    pub fn context(&self, ordinal: i32) -> Context {
        let ctx = self.driver.primary_retain(ordinal).unwrap();
        self.driver.ctx_set_current(Some(ctx)).unwrap();
        ctx
    }

    /// A non-blocking stream of the current context.
    pub fn stream(&self) -> Stream {
        let mut s: Raw = std::ptr::null_mut();
        // SAFETY: the driver's signature.
        let create: unsafe extern "C" fn(*mut Raw, c_uint) -> c_uint =
            unsafe { std::mem::transmute(self.symbol("cuStreamCreate")) };
        // SAFETY: the pointer is to a live handle.
        assert_eq!(unsafe { create(&mut s, 1) }, 0);
        Stream(s as usize)
    }

    pub fn destroy(&self, s: Stream) {
        // SAFETY: the driver's signature.
        let destroy: unsafe extern "C" fn(Raw) -> c_uint =
            unsafe { std::mem::transmute(self.symbol("cuStreamDestroy_v2")) };
        // SAFETY: the stream is live; tests do not use it afterwards.
        assert_eq!(unsafe { destroy(s.0 as Raw) }, 0);
    }

    pub fn memset(&self, p: u64, value: u8, size: usize, s: Stream) {
        // SAFETY: the driver's signature.
        let memset: unsafe extern "C" fn(u64, u8, usize, Raw) -> c_uint =
            unsafe { std::mem::transmute(self.symbol("cuMemsetD8Async")) };
        // SAFETY: the range is a live block of the test.
        assert_eq!(unsafe { memset(p, value, size, s.0 as Raw) }, 0);
    }

    /// Pinned memory, never freed: copies into other host memory wait for their stream, and would hide late work.
    pub fn pinned(&self, size: usize) -> *mut u8 {
        let mut p: *mut u8 = std::ptr::null_mut();
        // SAFETY: the driver's signature.
        let alloc: unsafe extern "C" fn(*mut *mut u8, usize) -> c_uint =
            unsafe { std::mem::transmute(self.symbol("cuMemAllocHost_v2")) };
        // SAFETY: the pointer is to a live value.
        assert_eq!(unsafe { alloc(&mut p, size) }, 0);
        p
    }

    /// Copies from the device in stream order; `to` is written when the stream gets there.
    pub fn copy_to_host(&self, to: *mut u8, from: u64, size: usize, s: Stream) {
        self.driver.memcpy_async(to as u64, from, size, s).unwrap();
    }

    fn call1(&self, name: &str, s: Stream) {
        // SAFETY: a driver function that takes a stream and nothing else.
        let f: unsafe extern "C" fn(Raw) -> c_uint = unsafe { std::mem::transmute(self.symbol(name)) };
        // SAFETY: the stream is live.
        assert_eq!(unsafe { f(s.0 as Raw) }, 0, "{name}");
    }

    pub fn wait_for(&self, s: Stream) {
        self.call1("cuStreamSynchronize", s);
    }

    /// Relaxed mode.
    pub fn begin_capture(&self, s: Stream) {
        // SAFETY: the driver's signature.
        let begin: unsafe extern "C" fn(Raw, c_uint) -> c_uint =
            unsafe { std::mem::transmute(self.symbol("cuStreamBeginCapture_v2")) };
        // SAFETY: the stream is live.
        assert_eq!(unsafe { begin(s.0 as Raw, 2) }, 0);
    }

    /// Ends the capture, which must be whole; the graph is dropped.
    pub fn end_capture(&self, s: Stream) {
        let mut graph: Raw = std::ptr::null_mut();
        // SAFETY: the driver's signature.
        let end: unsafe extern "C" fn(Raw, *mut Raw) -> c_uint =
            unsafe { std::mem::transmute(self.symbol("cuStreamEndCapture")) };
        // SAFETY: the stream is live, and the pointer to a live handle.
        assert_eq!(unsafe { end(s.0 as Raw, &mut graph) }, 0, "the capture was broken");
    }

    /// Holds a stream back until it is opened.
    pub fn gate(&self, s: Stream) -> Gate {
        // Leaked: the stream's worker reads it at a time of its own.
        let word: &'static std::sync::atomic::AtomicU32 = Box::leak(Box::default());
        // SAFETY: the driver's signature.
        let wait: unsafe extern "C" fn(Raw, u64, u32, c_uint) -> c_uint =
            unsafe { std::mem::transmute(self.symbol("cuStreamWaitValue32_v2")) };
        // SAFETY: the word lives for ever; 0 asks for a value of at least 1.
        assert_eq!(unsafe { wait(s.0 as Raw, std::ptr::from_ref(word) as u64, 1, 0) }, 0);
        Gate(word)
    }

    /// `name:nth[:code]` or `name:every:n[:code]`, comma-separated; empty ends all faults.
    pub fn fail(&self, spec: &str) {
        let spec = CString::new(spec).unwrap();
        // SAFETY: simcuda's signature.
        let set: unsafe extern "C" fn(*const c_char) = unsafe { std::mem::transmute(self.symbol("simcudaSetFail")) };
        // SAFETY: a NUL-terminated string.
        unsafe { set(spec.as_ptr()) }
    }

    /// How many there are alive of "handles", "mappings", "allocations" or another kind that simcuda counts.
    pub fn live(&self, kind: &str) -> i64 {
        let word = CString::new(kind).unwrap();
        // SAFETY: simcuda's signature.
        let count: unsafe extern "C" fn(*const c_char) -> i64 =
            unsafe { std::mem::transmute(self.symbol("simcudaLive")) };
        // SAFETY: a NUL-terminated string.
        let n = unsafe { count(word.as_ptr()) };
        assert!(n >= 0, "simcuda does not count {kind}");
        n
    }

    /// The longest that simcuda may put off an operation.
    pub fn delay_us(&self, max: u32) {
        // SAFETY: simcuda's signature.
        let set: unsafe extern "C" fn(c_uint) = unsafe { std::mem::transmute(self.symbol("simcudaSetDelay")) };
        // SAFETY: a plain number.
        unsafe { set(max) }
    }
}

pub struct Gate(&'static std::sync::atomic::AtomicU32);

impl Gate {
    pub fn open(&self) {
        self.0.store(1, std::sync::atomic::Ordering::Release);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}
