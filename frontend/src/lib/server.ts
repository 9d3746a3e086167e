// The one connection to the library. Everything is relative to the page's own address, which
// carries the token; in the exported page answers come from the page itself.

import { Asker, type Question, type Reply } from "./asker";
import { answersOf, carried, nearest } from "./canned";
import type { Answer, Arguments, Canned, Card, Catalogue, Json, Lessons, Start } from "./contract";

export const canned = carried<Canned>("scaledot-canned");
const start: Start | null = canned ?? carried<Start>("scaledot-start");

const base = () => new URL("./", location.href.split("#")[0]);

function socket(path: string): WebSocket {
  const address = new URL(path, base());
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  return new WebSocket(address);
}

async function get<Body>(path: string): Promise<Body> {
  const response = await fetch(new URL(path, base()));
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return (await response.json()) as Body;
}

export const lessons = (): Promise<Lessons> =>
  start ? Promise.resolve(start.lessons) : get("api/lessons");

export const catalogue = async (lang: string): Promise<Catalogue> =>
  start?.catalogue[lang] ?? (canned ? {} : get(`api/catalogue/${lang}`));

export const flashcards = (lang: string): Promise<Card[]> =>
  canned ? Promise.resolve(canned.flashcards[lang] ?? []) : get(`api/flashcards/${lang}`);

export const ankiAddress = (lang: string): string => `api/flashcards/${lang}.txt`;

export interface RaceStep {
  sequence: number;
  step?: Json;
  done?: boolean;
  error?: string;
}

/** Asks for lessons and plays races over one WebSocket, and opens it again when it was lost. */
export class Line {
  #socket: WebSocket | null = null;
  #asker: Asker;
  #race: { sequence: number; hear: (step: RaceStep) => void } | null = null;
  #sequence = 1_000_000; // races count apart from questions
  #retry = 250;

  constructor(
    show: (answer: Answer) => void,
    fail: (error: string) => void,
    private state: (connected: boolean) => void,
  ) {
    this.#asker = new Asker((question) => this.#send(question), show, fail);
    if (!canned) this.#open();
    else state(true);
  }

  ask(lesson: string, given: Arguments): void {
    this.#asker.ask(lesson, given);
  }

  race(given: Arguments, hear: (step: RaceStep) => void): void {
    const sequence = ++this.#sequence;
    this.#race = { sequence, hear };
    if (canned) return this.#playCanned(given, sequence, hear);
    this.#socket?.send(JSON.stringify({ sequence, race: given }));
  }

  stopRace(): void {
    if (this.#race && !canned) {
      this.#socket?.send(JSON.stringify({ sequence: this.#race.sequence, stop: true }));
    }
    this.#race = null;
  }

  #open(): void {
    const opened = socket("api/ask");
    this.#socket = opened;
    opened.onopen = () => {
      this.#retry = 250;
      this.state(true);
      this.#asker.again();
    };
    opened.onmessage = (event) => this.#hear(JSON.parse(String(event.data)) as RaceStep & Reply);
    opened.onclose = () => {
      this.state(false);
      setTimeout(() => this.#open(), this.#retry);
      this.#retry = Math.min(4000, this.#retry * 2);
    };
  }

  #hear(message: RaceStep & Reply): void {
    if (this.#race && message.sequence === this.#race.sequence) this.#race.hear(message);
    else if ("result" in message || ("error" in message && message.sequence < 1_000_000)) {
      this.#asker.receive(message);
    }
  }

  #send(question: Question): void {
    if (canned) {
      const answer = nearest(answersOf(canned, question.lesson), question.arguments);
      const reply: Reply = answer
        ? { ...answer, sequence: question.sequence }
        : { sequence: question.sequence, error: "not in this file" };
      queueMicrotask(() => this.#asker.receive(reply));
    } else if (this.#socket?.readyState === WebSocket.OPEN) {
      this.#socket.send(JSON.stringify(question));
    } // else: asked again when the connection stands
  }

  #playCanned(given: Arguments, sequence: number, hear: (step: RaceStep) => void): void {
    const found = nearest(canned?.race ?? [], given);
    for (const step of found?.steps ?? []) hear({ sequence, step });
    hear({ sequence, done: true });
  }
}

export const monitorSocket = (): WebSocket => socket("api/monitor");
