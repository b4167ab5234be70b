//! Answers of gateway pods, which may run any program, to the controller: to requests for `/load` and for `/readyz`.
#![no_main]

use fairlead_controller::egress::{cause_of_answer, cost_of_answer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(cost) = cost_of_answer(bytes) {
        assert!((-1..=64).contains(&cost));
        assert_eq!(cause_of_answer(bytes), None, "only an answer with status 200 has a load");
    }
    if let Some(message) = cause_of_answer(bytes) {
        assert!(message.chars().count() <= 450 && !message.contains(char::is_control));
    }
});
