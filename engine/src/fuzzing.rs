//! Entries for fuzz targets: decoders of what strangers send. Behind the feature `fuzzing`.

use crate::wire::frame::{Frame, HEADER_BYTES};
use crate::wire::message::{
    CONTROL_FRAME_BYTES_MAX, Greeting, HELLO_FRAME_BYTES_MAX, Message, encode,
};

/// Decodes a session message; one that decodes must encode, and decode to the same again.
///
/// # Panics
/// When it does not.
pub fn message(body: &[u8]) {
    if let Ok(message) = Message::decode(body) {
        let again =
            encode(&message, CONTROL_FRAME_BYTES_MAX).map(|frame| Message::decode(&frame[4..]));
        assert_eq!(again, Ok(Ok(message)), "a decoded message does not survive encoding");
    }
}

/// Decodes a handshake message, as [`message`] does.
///
/// # Panics
/// As [`message`].
pub fn greeting(body: &[u8]) {
    if let Ok(greeting) = Greeting::decode(body) {
        let again =
            encode(&greeting, HELLO_FRAME_BYTES_MAX).map(|frame| Greeting::decode(&frame[4..]));
        assert_eq!(again, Ok(Ok(greeting)), "a decoded greeting does not survive encoding");
    }
}

/// Decodes a frame header; one that decodes must encode, and decode to the same again.
///
/// # Panics
/// When it does not.
pub fn header(bytes: &[u8]) {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return };
    if let Ok(frame) = Frame::decode(header) {
        assert_eq!(
            Frame::decode(&frame.encode()),
            Ok(frame),
            "a decoded header does not survive encoding"
        );
    }
    // The checksum keeps the fuzzer out: with it put right, the fields are reached.
    let mut sealed = *header;
    Frame::seal(&mut sealed);
    if let Ok(frame) = Frame::decode(&sealed) {
        assert_eq!(
            Frame::decode(&frame.encode()),
            Ok(frame),
            "a sealed header does not survive encoding"
        );
    }
}
