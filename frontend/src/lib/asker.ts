// Questions by number, and the latest wins: an answer to an older question is not shown, and while
// one is under way only the newest of those that wait is sent.

import type { Answer, Arguments } from "./contract";

export interface Question {
  sequence: number;
  lesson: string;
  arguments: Arguments;
}

export type Reply = Answer | { sequence: number; error: string };

export class Asker {
  #next = 0;
  #under: Question | null = null;
  #waiting: Question | null = null;
  #newest = 0;

  constructor(
    private send: (question: Question) => void,
    private show: (answer: Answer) => void,
    private fail: (error: string) => void,
  ) {}

  ask(lesson: string, given: Arguments): number {
    const question = { sequence: ++this.#next, lesson, arguments: given };
    this.#newest = question.sequence;
    if (this.#under === null) this.#start(question);
    else this.#waiting = question;
    return question.sequence;
  }

  receive(reply: Reply): void {
    if (reply.sequence === this.#under?.sequence) {
      this.#under = null;
      const waiting = this.#waiting;
      this.#waiting = null;
      if (waiting) this.#start(waiting);
    }
    // While a slider moves, an answer one step behind is still better than none; what must never
    // happen is an older number after a newer one, and replies come in the order of the questions.
    if ("error" in reply) {
      if (reply.sequence === this.#newest) this.fail(reply.error);
    } else if ((reply.sequence ?? 0) <= this.#newest && this.#current(reply)) {
      this.show(reply);
    }
  }

  /** The connection is new: what was under way is asked again. */
  again(): void {
    const question = this.#waiting ?? this.#under;
    this.#under = null;
    this.#waiting = null;
    if (question) this.#start(question);
  }

  get busy(): boolean {
    return this.#under !== null;
  }

  #shown = 0;

  #current(reply: Answer): boolean {
    const sequence = reply.sequence ?? 0;
    if (sequence < this.#shown) return false;
    this.#shown = sequence;
    return true;
  }

  #start(question: Question): void {
    this.#under = question;
    this.send(question);
  }
}
