"""The process map and the declarations of who reads and writes what agree."""

from replayground.deploy.programs import PROGRAMS, PROGRAMS_OF_FIELD, PROGRAMS_OF_RUN
from replayground.schemas.programs import ACCESS, OPERATOR


def test_every_program_has_a_declaration_and_every_declaration_a_program() -> None:
    assert {program.name for program in PROGRAMS} == {access.program for access in ACCESS} - {OPERATOR}


def test_both_say_the_same_of_what_belongs_to_the_field() -> None:
    of_field = {access.program for access in ACCESS if access.of_field} - {OPERATOR}
    assert {program.name for program in PROGRAMS_OF_FIELD} == of_field
    assert not of_field & {program.name for program in PROGRAMS_OF_RUN}
