//! What can be seen of the processes from outside: what the kernel holds for their sockets, and what
//! they count.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// The kernel's table of IPv4 sockets.
const SOCKETS: &str = "/proc/net/tcp";
/// How often it is looked at, and how many looks in a row must see the same.
const LOOK: Duration = Duration::from_millis(20);
const SAME_LOOKS: u32 = 5;
/// Longest wait for a page of metrics.
const SCRAPE: Duration = Duration::from_secs(10);

/// Bytes that the kernel holds for the connections of a listening port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queued {
    /// Sent from the port, and not acknowledged by the other end's kernel.
    pub(super) unsent: u64,
    /// Come from the port, and not read.
    pub(super) unread: u64,
}

/// Waits until the connections of a port, if they are not read from, take no more; says what they hold.
pub(super) fn until_full(port: u16, within: Duration) -> Result<Queued> {
    let (start, mut before, mut same) = (Instant::now(), Queued::default(), 0);
    loop {
        let table = std::fs::read_to_string(SOCKETS).context(SOCKETS)?;
        let now = queued(&table, port);
        same = if now.unsent > 0 && now.unsent == before.unsent { same + 1 } else { 0 };
        if same == SAME_LOOKS {
            return Ok(now);
        }
        ensure!(start.elapsed() < within, "waited {within:?} for lanes to fill up: {now:?}");
        before = now;
        std::thread::sleep(LOOK);
    }
}

fn queued(table: &str, port: u16) -> Queued {
    let mut sum = Queued::default();
    for line in table.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, _, queues, ..] = fields[..] else { continue };
        let hex = |pair: &str| {
            let (left, right) = pair.split_once(':')?;
            Some((u64::from_str_radix(left, 16).ok()?, u64::from_str_radix(right, 16).ok()?))
        };
        let port_of = |pair: &str| hex(pair).map(|(_, port)| port);
        let Some((unsent, unread)) = hex(queues) else { continue };
        if port_of(local) == Some(u64::from(port)) {
            sum.unsent += unsent;
        }
        if port_of(remote) == Some(u64::from(port)) {
            sum.unread += unread;
        }
    }
    sum
}

/// A counter of a process, from where it serves its metrics.
pub(super) fn counter(addr: SocketAddr, name: &str) -> Result<u64> {
    let mut page = String::new();
    let mut stream = TcpStream::connect_timeout(&addr, SCRAPE)?;
    stream.set_read_timeout(Some(SCRAPE))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n")?;
    stream.read_to_string(&mut page).with_context(|| format!("the metrics at {addr}"))?;
    let mut lines = page.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
    let value = lines.next().and_then(|(_, value)| value.parse().ok());
    value.with_context(|| format!("no {name} among the metrics at {addr}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_a_port_are_summed_on_both_ends_and_those_of_others_are_not() {
        let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100007F:1F90 0100007F:8001 01 00000100:00000007 00:00000000 00000000     0        0 2 1
   2: 0100007F:8001 0100007F:1F90 01 00000009:00000020 00:00000000 00000000     0        0 3 1
   3: 0100007F:8001 0100007F:1F91 01 0000FFFF:0000FFFF 00:00000000 00000000     0        0 4 1
   4: nonsense
";
        assert_eq!(queued(table, 0x1f90), Queued { unsent: 0x100, unread: 0x20 });
    }
}
