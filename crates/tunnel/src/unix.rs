//! UNIX sockets that only root may open.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use nix::sys::stat::{Mode, fchmod};
use socket2::{Domain, SockAddr, Socket, Type};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;

/// Listens at `path` with mode 0600 from the first moment, replacing the socket of a killed process.
///
/// # Errors
/// `AddrInUse` when a process listens there; the kernel's error otherwise.
pub(crate) fn listen(path: &Path, kind: Type) -> io::Result<Socket> {
    let address = SockAddr::unix(path)?;
    if Socket::new(Domain::UNIX, kind, None)?.connect(&address).is_ok() {
        let taken = format!("{} belongs to another running device", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, taken));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = Socket::new(Domain::UNIX, kind, None)?;
    // Linux gives the file the mode of the unbound socket (unix(7)).
    fchmod(socket.as_fd(), Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket.bind(&address)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
