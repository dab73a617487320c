//! Proving that one has the shared secret, without saying it.
//!
//! Each side proves over both sides' hellos, and both hellos carry fresh nonces, so that a proof is
//! good for one handshake. The role is in it, so that a proof cannot be sent back to who made it.
//! What follows the handshake is neither encrypted nor authenticated: the secret keeps strangers out
//! of a network in which nobody rewrites packets.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::config::Secret;
use crate::wire::message::Hello;

/// Bytes of a proof.
pub(super) type Proof = [u8; 32];

/// Which side a proof is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Dialer,
    Listener,
}

impl Side {
    const fn label(self) -> &'static [u8] {
        match self {
            Self::Dialer => b"kvferry control, dialer",
            Self::Listener => b"kvferry control, listener",
        }
    }
}

/// Digest of both hellos. Both sides compute it from the decoded values: postcard writes a value in
/// one way only, and each is preceded by its length.
pub(super) fn transcript(dialer: &Hello, listener: &Hello) -> Result<[u8; 32], postcard::Error> {
    let mut digest = Sha256::new();
    for hello in [dialer, listener] {
        let bytes = postcard::to_stdvec(hello)?;
        digest.update((bytes.len() as u64).to_le_bytes());
        digest.update(&bytes);
    }
    Ok(digest.finalize().into())
}

fn mac(secret: &Secret, side: Side, transcript: &[u8; 32]) -> Option<Hmac<Sha256>> {
    // HMAC takes keys of any length; the type only does not know it.
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(secret.bytes()).ok()?;
    mac.update(side.label());
    mac.update(transcript);
    Some(mac)
}

/// The proof of `side`; zeros where there is no secret to prove.
pub(super) fn prove(secret: Option<&Secret>, side: Side, transcript: &[u8; 32]) -> Proof {
    let mac = secret.and_then(|secret| mac(secret, side, transcript));
    mac.map_or([0; 32], |mac| mac.finalize().into_bytes().into())
}

/// Whether `proof` is that of `side`; takes the same time wherever it differs.
pub(super) fn verify(
    secret: Option<&Secret>,
    side: Side,
    transcript: &[u8; 32],
    proof: &Proof,
) -> bool {
    match secret {
        None => *proof == [0; 32],
        Some(secret) => {
            mac(secret, side, transcript).is_some_and(|mac| mac.verify_slice(proof).is_ok())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Incarnation;
    use crate::wire::message::LaneIo;

    fn hello(nonce: u8) -> Hello {
        Hello {
            carriers: crate::wire::message::Carriers::RdmaOrTcp,
            incarnation: Incarnation(u128::from(nonce)),
            name: String::new(),
            nonce: [nonce; 32],
            has_secret: true,
            lanes: 1,
            io: LaneIo::Epoll,
            silent_ms: 1000,
            listen_port: None,
        }
    }

    #[test]
    fn a_proof_holds_for_one_secret_one_side_and_one_pair_of_hellos() {
        let secret = Secret::new(*b"0123456789abcdef").unwrap();
        let other = Secret::new(*b"0123456789abcdeg").unwrap();
        let this = transcript(&hello(1), &hello(2)).unwrap();
        let proof = prove(Some(&secret), Side::Dialer, &this);
        assert!(verify(Some(&secret), Side::Dialer, &this, &proof));
        assert!(!verify(Some(&secret), Side::Listener, &this, &proof), "reflected");
        assert!(!verify(Some(&other), Side::Dialer, &this, &proof));
        let replayed = transcript(&hello(1), &hello(3)).unwrap();
        assert!(!verify(Some(&secret), Side::Dialer, &replayed, &proof));
        assert!(!verify(Some(&secret), Side::Dialer, &this, &[0; 32]));
        assert!(!verify(None, Side::Dialer, &this, &proof));
    }
}
