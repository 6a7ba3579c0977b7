//! Everything that is written in assembly: x86-64.

use std::ffi::c_void;

// One word a thread, at a fixed distance from the thread pointer: `thread_local!` in a shared library calls the linker at every access
// (4 ns of a 20 ns pair). Eight bytes are taken of what the linker keeps free for libraries that are opened late.
std::arch::global_asm!(
    ".section .tbss,\"awT\",@nobits",
    ".balign 8",
    ".type gpupool_thread_word, @object",
    ".size gpupool_thread_word, 8",
    ".globl gpupool_thread_word",
    ".hidden gpupool_thread_word",
    "gpupool_thread_word:",
    ".zero 8",
    ".text",
);

/// This thread's word; NULL at first.
#[inline(always)]
pub fn thread_word() -> *const c_void {
    let word: *const c_void;
    // SAFETY: reads a thread-local variable of this library, through the offset that the linker left in the GOT.
    unsafe {
        std::arch::asm!(
            "mov {word}, qword ptr [rip + gpupool_thread_word@GOTTPOFF]",
            "mov {word}, qword ptr fs:[{word}]",
            word = out(reg) word,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    word
}

pub fn set_thread_word(value: *const c_void) {
    // SAFETY: writes the same variable.
    unsafe {
        std::arch::asm!(
            "mov {at}, qword ptr [rip + gpupool_thread_word@GOTTPOFF]",
            "mov qword ptr fs:[{at}], {value}",
            at = out(reg) _,
            value = in(reg) value,
            options(nostack, preserves_flags)
        );
    }
}

/// The body of the exported `dlsym(handle, name)`: names that begin with `cu` go to `cuda(handle, name, caller)`, which answers NULL to
/// leave the question to libc; everything else jumps to libc's `dlsym`, whose address `known` keeps (0: `find()` returns it), with the
/// stack as it was, so that `RTLD_NEXT` sees who asked.
#[cfg(not(test))]
macro_rules! dlsym_body {
    ($known:path, $cuda:path, $find:path) => {
        core::arch::naked_asm!(
            "test rsi, rsi",
            "je 2f",
            "cmp byte ptr [rsi], 'c'",
            "jne 2f",
            "cmp byte ptr [rsi + 1], 'u'",
            "je 3f",
            // Not CUDA's: libc's dlsym, as if it had been called itself.
            "2:",
            "mov rax, [rip + {known}]",
            "test rax, rax",
            "je 4f",
            "jmp rax",
            // Perhaps CUDA's. The third argument is who asks.
            "3:",
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "mov rdx, [rsp + 24]",
            "call {cuda}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "test rax, rax",
            "je 2b",
            "ret",
            // The first look-up of the process.
            "4:",
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "call {find}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            known = sym $known,
            cuda = sym $cuda,
            find = sym $find,
        )
    };
}

#[cfg(not(test))]
pub(crate) use dlsym_body;

#[cfg(test)]
mod tests {
    #[test]
    fn every_thread_has_a_word_of_its_own() {
        super::set_thread_word(8 as _);
        let other = std::thread::spawn(|| {
            let before = super::thread_word();
            super::set_thread_word(16 as _);
            (before as usize, super::thread_word() as usize)
        });
        assert_eq!(other.join().unwrap(), (0, 16));
        assert_eq!(super::thread_word() as usize, 8);
        super::set_thread_word(std::ptr::null());
    }
}
