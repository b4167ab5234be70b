//! Errors of DEL in words that make the runtime repeat it.
//!
//! containerd's go-cni searches the text of an error of DEL for "not found" and, once the network namespace is gone, for "no such
//! file or directory", and takes either for a success (`Remove`, `cni.go`): the sandbox goes, DEL is never repeated, and the plugins
//! before in the chain are not called. The kernel, gRPC and other programs use these words in their messages. Code 3 of the
//! specification says in the same way that nothing is left to do.

use crate::failure::{Failure, code};

/// Texts that a runtime takes for a success, in lower case, and words of the same meaning. No text of the second column begins or
/// ends with what one of the first ends or begins with, so that none arises where one is replaced.
const TAKEN_FOR_SUCCESS: [(&str, &str); 2] =
    [("not found", "missing"), ("no such file or directory", "missing file or directory")];

/// An error of DEL that no runtime takes for a success.
pub fn error_of_del(failure: Failure) -> Failure {
    let code = if failure.code == code::UNKNOWN_CONTAINER { code::IO } else { failure.code };
    Failure { code, msg: reworded(failure.msg), details: reworded(failure.details), ..failure }
}

fn reworded(mut text: String) -> String {
    for (phrase, word) in TAKEN_FOR_SUCCESS {
        // ASCII alone changes, so that positions are those of the text.
        while let Some(start) = text.to_ascii_lowercase().find(phrase) {
            text.replace_range(start..start.saturating_add(phrase.len()), word);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Text that is full of what runtimes look for, in parts and as a whole.
    fn hostile() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            Just("not found".to_owned()),
            Just("Not Found".to_owned()),
            Just("no such file or directory".to_owned()),
            Just("No such file or directory (os error 2)".to_owned()),
            Just("no such file or ".to_owned()),
            Just("directory".to_owned()),
            Just("missing".to_owned()),
            Just("not ".to_owned()),
            Just("found".to_owned()),
            Just("no".to_owned()),
            Just("t found".to_owned()),
            any::<String>(),
        ];
        prop::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
    }

    /// Text of the error as libcni makes it (`Error`, `pkg/types/types.go`).
    fn text(failure: &Failure) -> String {
        format!("{}; {}", failure.msg, failure.details).to_lowercase()
    }

    #[test]
    fn the_meaning_stays() {
        let plain = Failure::new(code::IO, "the kernel refused: EBUSY", "wait");
        assert_eq!(error_of_del(plain.clone()), plain);
        let gone = Failure::new(5, "ns /x: No such file or directory (os error 2)", "entity was not found");
        let said = error_of_del(gone);
        assert_eq!(said.msg, "ns /x: missing file or directory (os error 2)");
        assert_eq!(said.details, "entity was missing");
    }

    proptest! {
        #[test]
        fn no_error_of_del_is_taken_for_a_success(code in 0..1000u32, msg in hostile(), details in hostile()) {
            let said = error_of_del(Failure::new(code, msg, details));
            for phrase in ["not found", "no such file or directory"] {
                prop_assert!(!text(&said).contains(phrase), "{said:?}");
            }
            prop_assert_ne!(said.code, 3, "an unknown container needs no DEL");
        }

        #[test]
        fn any_status_of_the_node_program_makes_the_runtime_repeat_a_del(grpc in 0..20i32, message in hostile()) {
            let status = tonic::Status::new(tonic::Code::from(grpc), message);
            let said = text(&error_of_del(Failure::of_status(&status, "/s")));
            prop_assert!(!said.contains("not found") && !said.contains("no such file or directory"), "{said}");
        }
    }
}
