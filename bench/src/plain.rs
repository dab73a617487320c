//! The yardstick: one blocking TCP connection, `writev` from scattered pages, `readv` into scattered
//! pages, one byte back once the room has arrived. No framing, no check, no failure handling.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use anyhow::{Result, bail};
use kvferry::Pool;

use crate::shape::Shape;

/// `IOV_MAX` of Linux.
const SLICES_PER_CALL: usize = 1024;

/// The sending end.
pub(crate) struct Sender {
    stream: TcpStream,
    pages: Vec<Vec<u8>>,
    order: Vec<u32>,
}

impl Sender {
    /// The yardstick has memory of its own, as large as the engine's pool and as scattered.
    pub(crate) fn accept(listener: &TcpListener, shape: &Shape) -> Result<Self> {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, pages: memory(shape), order: shape.sources() })
    }

    pub(crate) fn send(&mut self) -> Result<()> {
        let mut slices: Vec<IoSlice<'_>> =
            self.order.iter().map(|&page| IoSlice::new(&self.pages[page as usize])).collect();
        let mut left = &mut slices[..];
        while !left.is_empty() {
            let call = left.len().min(SLICES_PER_CALL);
            let sent = self.stream.write_vectored(&left[..call])?;
            IoSlice::advance_slices(&mut left, sent);
        }
        let mut byte = [0];
        self.stream.read_exact(&mut byte)?;
        Ok(())
    }
}

/// The receiving end.
pub(crate) struct Receiver {
    stream: TcpStream,
    pages: Vec<Vec<u8>>,
}

impl Receiver {
    pub(crate) fn connect(addr: SocketAddr, shape: &Shape, _pool: &Pool) -> Result<Self> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        let mut memory = memory(shape);
        let pages = shape
            .targets()
            .iter()
            .map(|&page| std::mem::take(&mut memory[page as usize]))
            .collect();
        Ok(Self { stream, pages })
    }

    pub(crate) fn receive(&mut self) -> Result<()> {
        let mut slices: Vec<IoSliceMut<'_>> =
            self.pages.iter_mut().map(|page| IoSliceMut::new(page)).collect();
        let mut left = &mut slices[..];
        while !left.is_empty() {
            let call = left.len().min(SLICES_PER_CALL);
            let got = self.stream.read_vectored(&mut left[..call])?;
            if got == 0 {
                bail!("the plain sender went away");
            }
            IoSliceMut::advance_slices(&mut left, got);
        }
        self.stream.write_all(&[1])?;
        Ok(())
    }
}

fn memory(shape: &Shape) -> Vec<Vec<u8>> {
    (0..shape.pages * 2).map(|page| vec![page as u8 | 1; shape.page_bytes as usize]).collect()
}
