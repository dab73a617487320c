//! The thread that computes: one job after the other, while rooms are looked after elsewhere.

use std::sync::mpsc;

use anyhow::{Context, Result};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// Hands jobs to a thread of their own, in order. The thread ends with its last handle.
#[derive(Clone, Debug)]
pub struct Compute(mpsc::Sender<Job>);

impl Compute {
    /// Starts the thread.
    ///
    /// # Errors
    /// The operating system's, when it has no thread to give.
    pub fn start() -> Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let run = move || queue.iter().for_each(|job| job());
        std::thread::Builder::new().name("compute".to_owned()).spawn(run)?;
        Ok(Self(jobs))
    }

    /// Runs a job, after those handed in before it.
    ///
    /// # Errors
    /// The thread is gone: an earlier job panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        const GONE: &str = "the compute thread is gone; its panic is on stderr";
        let (reply, answer) = oneshot::channel();
        self.0.send(Box::new(move || drop(reply.send(job())))).ok().context(GONE)?;
        answer.await.context(GONE)
    }
}
