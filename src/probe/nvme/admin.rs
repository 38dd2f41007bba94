//! The one admin command that is sent to a drive: Get Log Page, for its SMART log.
//!
//! Source: `struct nvme_passthru_cmd` and `NVME_IOCTL_ADMIN_CMD` in
//! <https://github.com/torvalds/linux/blob/master/include/uapi/linux/nvme_ioctl.h>
#![expect(unsafe_code, reason = "no safe call sends an NVMe admin command; this file holds the only one")]

use crate::policy::smart::PAGE_BYTES;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use std::ffi::c_void;
use std::os::fd::AsFd;

const GET_LOG_PAGE: u8 = 0x02;

/// SMART / Health Information.
const SMART_LOG: u32 = 0x02;

/// The whole drive, not one namespace.
const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// Why there is no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum AdminError {
    /// The kernel does not send it.
    #[error("{0}")]
    System(Errno),
    /// The drive refuses it.
    #[error("the drive answers with status {0:#x}")]
    Refused(u32),
}

#[repr(C)]
struct PassthroughCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    address: u64,
    metadata_length: u32,
    data_length: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_milliseconds: u32,
    result: u32,
}

/// A command whose data goes into `page`.
struct Request<'a> {
    command: PassthroughCommand,
    page: &'a mut [u8; PAGE_BYTES],
}

// SAFETY: the opcode is that of `struct nvme_passthru_cmd`, to which `as_ptr` points; its 72 bytes are checked by a test. The command
// names a buffer and its exact length, which is borrowed for as long as the request lives. The kernel writes to nothing else.
unsafe impl Ioctl for Request<'_> {
    type Output = u32;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<PassthroughCommand>(b'N', 0x41)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.command.address = self.page.as_mut_ptr() as u64;
        (&raw mut self.command).cast()
    }

    unsafe fn output_from_ptr(status: IoctlOutput, _command: *mut c_void) -> rustix::io::Result<u32> {
        // Above zero it is the drive's own status.
        Ok(u32::try_from(status).unwrap_or_default())
    }
}

/// The drive's SMART log page. Blocks until the drive answers, or the kernel resets it.
///
/// No time-out of ours goes with it: at the end of one the kernel resets the controller, and a slow answer is no reason for that.
///
/// # Errors
/// When the kernel or the drive refuses.
pub(super) fn smart_log(controller: impl AsFd) -> Result<Box<[u8; PAGE_BYTES]>, AdminError> {
    let dwords = u32::try_from(PAGE_BYTES / 4).unwrap_or_default();
    let command = PassthroughCommand {
        opcode: GET_LOG_PAGE,
        flags: 0,
        reserved: 0,
        nsid: ALL_NAMESPACES,
        cdw2: 0,
        cdw3: 0,
        metadata: 0,
        address: 0,
        metadata_length: 0,
        data_length: u32::try_from(PAGE_BYTES).unwrap_or_default(),
        cdw10: (dwords - 1) << 16 | SMART_LOG,
        cdw11: 0,
        cdw12: 0,
        cdw13: 0,
        cdw14: 0,
        cdw15: 0,
        timeout_milliseconds: 0,
        result: 0,
    };
    let mut page = Box::new([0; PAGE_BYTES]);
    // SAFETY: `Request` describes exactly what the call reads and writes, see above; on a descriptor that is no NVMe controller's
    // the kernel answers ENOTTY, as this number with this size is no other driver's.
    match unsafe { ioctl(controller, Request { command, page: &mut page }) } {
        Ok(0) => Ok(page),
        Ok(status) => Err(AdminError::Refused(status)),
        Err(error) => Err(AdminError::System(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::mem::{offset_of, size_of};

    #[test]
    fn the_command_is_laid_out_as_the_kernel_has_it() {
        assert_eq!(size_of::<PassthroughCommand>(), 72);
        let offsets = [
            offset_of!(PassthroughCommand, nsid),
            offset_of!(PassthroughCommand, address),
            offset_of!(PassthroughCommand, data_length),
            offset_of!(PassthroughCommand, cdw10),
            offset_of!(PassthroughCommand, timeout_milliseconds),
        ];
        assert_eq!(offsets, [4, 24, 36, 40, 64]);
        assert_eq!(opcode::read_write::<PassthroughCommand>(b'N', 0x41), 0xC048_4E41);
    }

    #[test]
    fn what_is_no_controller_refuses() {
        assert_eq!(smart_log(File::open("/dev/null").unwrap()), Err(AdminError::System(Errno::NOTTY)));
    }
}
