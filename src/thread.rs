//! Threads of the library's own.

/// Starts a thread that takes none of the program's signals.
pub fn background(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    // SAFETY: the sets are plain data that the calls fill in; the mask is this thread's, and is put back.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        // The new thread inherits the mask.
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let started = std::thread::Builder::new().name(name.into()).spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        started.map(|_| ())
    }
}
