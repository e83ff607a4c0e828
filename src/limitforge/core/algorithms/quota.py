"""Quota: a fixed window on a calendar. The caller has the calendar; the algorithm only sees when windows begin."""

from limitforge.core.algorithms.fixed_window import Window, WindowAlgorithm


class QuotaAlgorithm(WindowAlgorithm, frozen=True):
    """Three consecutive windows: [first, second), [second, third), [third, end)."""

    calendar_hash: int  # 48 bits that identify the calendar (period, zone, anchor)
    first: int = 0
    second: int = 0
    third: int = 0
    end: int = 0

    code = 7
    letter = "q"
    override_width = 1

    def fresh(self, now: int) -> Window | None:
        if not self.first <= now < self.end:
            return None
        end = self.second if now < self.second else self.third if now < self.third else self.end
        return Window(now, end, 0, self, ())

    def open(self, state: Window, now: int) -> Window | None:
        opened = self.fresh(now)
        if opened is not None and state.algorithm.calendar_hash == self.calendar_hash:
            opened.used, opened.pending = state.used, state.pending
        return opened
