//! A real API server accepts `deploy/`, prints what the documentation promises, keeps users' objects as they
//! wrote them ([`objects`]), refuses bad ones with words that help ([`validation`]), holds every program to its
//! rights ([`rights`]), and takes what a user installs ([`install`]).

#![cfg(test)]

mod bed;
mod install;
mod objects;
mod rights;
mod validation;
