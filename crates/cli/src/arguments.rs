//! Arguments of the commands, and parsers of values that the programs take, too.

pub mod egress;
pub mod peer;
pub mod peers;
pub mod queries;
pub mod uninstall;
pub mod value_parsers;

#[cfg(test)]
pub(crate) mod tests {
    use clap::{Args, Error, Parser, Subcommand};

    /// Parses the words behind the name of a command that has arguments.
    pub(crate) fn arguments<A: Args>(words: &str) -> Result<A, Error> {
        #[derive(Parser)]
        #[command(no_binary_name = true)]
        struct Words<A: Args> {
            #[command(flatten)]
            arguments: A,
        }
        Words::try_parse_from(words.split_whitespace()).map(|words| words.arguments)
    }

    /// Parses the words behind the name of a command that has subcommands.
    pub(crate) fn command<C: Subcommand>(words: &str) -> Result<C, Error> {
        #[derive(Parser)]
        #[command(no_binary_name = true)]
        struct Words<C: Subcommand> {
            #[command(subcommand)]
            command: C,
        }
        Words::try_parse_from(words.split_whitespace()).map(|words| words.command)
    }
}
