import { describe, expect, it } from "vitest";
import { Asker, type Question } from "../src/lib/asker";
import type { Answer } from "../src/lib/contract";

function setUp() {
  const sent: Question[] = [];
  const shown: number[] = [];
  const failed: string[] = [];
  const asker = new Asker(
    (question) => sent.push(question),
    (answer) => shown.push(answer.arguments.d_k as number),
    (error) => failed.push(error),
  );
  const answer = (question: Question): Answer => ({ ...question, result: {}, python: "" });
  return { asker, sent, shown, failed, answer };
}

describe("the latest question wins", () => {
  it("sends one at a time, and of those that wait only the newest", () => {
    const { asker, sent, shown, answer } = setUp();
    for (const d_k of [1, 2, 4, 8, 16]) asker.ask("variance", { d_k });
    expect(sent.map((question) => question.arguments.d_k)).toEqual([1]);
    asker.receive(answer(sent[0]!));
    expect(sent.map((question) => question.arguments.d_k)).toEqual([1, 16]);
    asker.receive(answer(sent[1]!));
    expect(shown).toEqual([1, 16]);
    expect(asker.busy).toBe(false);
  });

  it("never shows an older answer after a newer one", () => {
    const { asker, sent, shown, answer } = setUp();
    asker.ask("variance", { d_k: 1 });
    asker.receive(answer(sent[0]!));
    asker.ask("variance", { d_k: 2 });
    asker.receive(answer(sent[1]!));
    asker.receive(answer(sent[0]!)); // a late copy
    expect(shown).toEqual([1, 2]);
  });

  it("tells the error of the newest question only", () => {
    const { asker, sent, failed } = setUp();
    asker.ask("vectors", { d_k: 1 });
    asker.ask("vectors", { d_k: 2 });
    asker.receive({ sequence: sent[0]!.sequence, error: "old" });
    asker.receive({ sequence: sent[1]!.sequence, error: "new" });
    expect(failed).toEqual(["new"]);
  });

  it("asks again over a new connection", () => {
    const { asker, sent } = setUp();
    asker.ask("variance", { d_k: 1 });
    asker.ask("variance", { d_k: 2 });
    asker.again();
    expect(sent.map((question) => question.arguments.d_k)).toEqual([1, 2]);
  });
});
